"""Runs: a copy of a good one with its files damaged or renamed, and files of others in its folders."""

import shutil
from pathlib import Path
from random import Random

from hostile.case import Case, Material
from hostile.models import spoil

_THEIRS = (
    *("run/notes.txt", "run/model.old", "run/logs/notes.txt", "run/cache/notes.txt", "run/model/README.md"),
    *("run/checkpoints/checkpoint-best", "run/checkpoints/checkpoint-8-backup/weights"),
    "run/checkpoints/checkpoint-\u00b2/weights",
    "run/checkpoints/checkpoint-4/theirs.txt",
)
_NAMES = ("metrics.jsonl", "data.json", "relpos.json", "recipe.yaml", "relpos.lock", "cache/tables.json")
_CHECKPOINTS = ("checkpoint--4", "checkpoint-04", "checkpoint-9" + "9" * 30, "checkpoint-4 ", "checkpoint-0")


def make(random: Random, home: Path, material: Material) -> Case:
    """`train --resume`, `train`, `evaluate` or `translate` of the run."""
    run = home / "run"
    shutil.copytree(material.run, run)
    kept = tuple(random.sample(_THEIRS, random.randint(0, 3)))
    for name in kept:
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("mine\n")
    kind = random.randrange(8)
    checkpoint = run / "checkpoints" / random.choice(("checkpoint-4", "checkpoint-8"))
    if kind == 0:
        shutil.move(checkpoint, checkpoint.with_name(random.choice(_CHECKPOINTS)))
    elif kind == 1:
        # what is reached over a link is not in the run
        shutil.move(checkpoint, home / "elsewhere")
        checkpoint.symlink_to(home / "elsewhere")
    elif kind == 2:
        part = run / random.choice(("cache", "checkpoints", "tokenizer", "logs", "model"))
        if not any(name.startswith(str(part.relative_to(home))) for name in kept) and part.exists():
            shutil.rmtree(part)
            random.choice((part.touch, part.mkdir, lambda: part.symlink_to(home / "notes"), lambda: None))()
    else:
        files = {str(path.relative_to(home)) for path in run.rglob("*") if path.is_file()} - set(kept)
        files = {name for name in files if name != "run/relpos.lock"}
        often = {f"run/{name}" for name in _NAMES} & files
        for _ in range(random.choice((1, 1, 2))):
            name = random.choice(sorted(often if random.random() < 0.5 else files))
            if not (home / name).is_symlink() and (home / name).is_file():
                spoil(random, home / name, home)
    (home / "in.txt").write_text("one two\n")
    (home / "mine.yaml").write_bytes(material.recipe.read_bytes())
    more = random.choice(([], ["--training.updates=10"]))
    arguments = random.choice(
        (
            ["train", "mine.yaml", "--out", "run", "--resume", *more],
            ["train", "mine.yaml", "--out", "run", "--resume", *more],
            ["train", "run/recipe.yaml", "--out", "run", "--resume", *more],
            ["train", "mine.yaml", "--out", "run"],
            ["evaluate", "run"],
            ["evaluate", "run"],
            ["translate", "run", "in.txt"],
            ["seal", "run"],
        )
    )
    outputs = ("run",) if arguments[0] in ("train", "seal") else ()
    return Case("run", arguments, outputs=outputs, kept=kept)
