"""Options: wrong values, misspelt names, combinations, for every command."""

import shutil
from pathlib import Path
from random import Random

from hostile.bytes_and_values import ODD_STRINGS
from hostile.case import Case, Material
from hostile.text import words

_NUMBERS = (
    *("0", "1", "2", "-1", "1.5", "300", "1000000000", "9" * 400, "nan", "inf", "-inf", "1e308", "1e-40"),
)
_OPTIONS = {
    "translate": [
        *("--beams", "--length-penalty", "--n-best", "--prefix", "--temperature", "--seed", "--batch-tokens"),
        *("--max-line-bytes", "--output", "-o", "--sample", "--split-long", "--json", "--help"),
    ],
    "evaluate": [
        *("--beams", "--length-penalty", "--lengths", "--hypotheses", "--batch-tokens", "--data", "--json"),
    ],
    "seal": ["--check"],
    "doctor": ["--json"],
    "recipe": ["--help"],
    "train": ["--json", "--resume"],
    "reproduce": ["--json"],
}
_FLAGS = ("--sample", "--split-long", "--json", "--check", "--help", "--resume")
_PATHS = ("--output", "-o", "--hypotheses", "--data")
_KEYS = [
    *("training.updates", "training.minutes", "training.adam_betas", "training.best", "training.seed"),
    *("model.d_model", "model.relative_max_distance", "model.activation", "model.norm_first", "data.folder"),
    *("data.train", "data.cleaning", "data.source_language", "data.test_share", "tokenizer.vocabulary"),
    *("translation.beams", "translation.length_penalty", "format", "data.train.0.tsv", ".", ".."),
    *("training.", ".seed", "training.updatess"),
]


def make(random: Random, home: Path, material: Material) -> Case:
    """Any command with options that are wrong in some way, or only odd."""
    command = random.choice(
        (*_OPTIONS, "translate", "translate", "evaluate", "recipe", "", "trian", "--version")
    )
    arguments, outputs, added = [command], (), ()
    if command in ("translate", "evaluate"):
        (home / "in.tsv").write_text(f"{words(random)}\t{words(random)}\n" * 2)
        arguments += [_path(random, str(material.model))]
        arguments += ["in.tsv"] if command == "translate" else ["--data", "in.tsv"]
    elif command == "seal":
        shutil.copytree(material.model, home / "model")
        outputs = ("model/seal.json",)
        arguments += [_path(random, "model")]
    elif command == "recipe":
        arguments += [_path(random, str(material.recipe))]
    elif command == "train":
        # fails in any case, after all else was looked at
        wrong = random.choice(("--training.updates=0", "--model.d_modell=3", "--data.seed=x", "--ouut=a"))
        arguments += [_path(random, str(material.recipe)), "--out", _path(random, "."), wrong]
    elif command == "reproduce":
        wrong = random.choice(("--training.updates=0", "--model.d_modell=3", "--data.seed=x", "--ouut=a"))
        arguments += [_path(random, "demo"), "--out", _path(random, "."), wrong]
    for _ in range(random.choice((1, 1, 2, 3))):
        arguments += _option(random, command)
    if command == "doctor":
        arguments.append(_misspelt(random, "--json"))
    if random.random() < 0.1:
        random.shuffle(arguments)
    if random.random() < 0.1:
        arguments.insert(random.randrange(len(arguments) + 1), random.choice(ODD_STRINGS))
    # an output may be any name that the user gives, but not one that is there already and is no file of text
    added = ("",)
    return Case("options", [_argument(each) for each in arguments], b"one\n", outputs, (), added)


def _option(random: Random, command: str) -> list[str]:
    if command in ("recipe", "train", "reproduce") and random.random() < 0.8:
        key = random.choice(_KEYS)
        value = random.choice(ODD_STRINGS + _NUMBERS)
        return random.choice(([f"--{key}", value], [f"--{key}={value}"], [f"--{key}"]))
    name = random.choice(_OPTIONS.get(command, ["--json", "--help"]))
    shown = _misspelt(random, name) if random.random() < 0.3 else name
    if name in _FLAGS:
        return [shown]
    if name in _PATHS:
        return [shown, _path(random, "new.txt")]
    value = random.choice(_NUMBERS if random.random() < 0.6 else ODD_STRINGS)
    return random.choice(([shown, value], [f"{shown}={value}"], [shown]))


def _path(random: Random, path: str) -> str:
    """`path`, or another; none that names what is the user's and may be written over at their own wish."""
    odd = tuple(each for each in ODD_STRINGS if "thesis" not in each and not each.isspace())
    return path if random.random() < 0.7 else random.choice(odd)


def _misspelt(random: Random, name: str) -> str:
    at = random.randrange(2, len(name)) if len(name) > 2 else 1
    return random.choice(
        (name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name.upper(), name + "s", f"-{name}")
    )


def _argument(text: str) -> str:
    # the system takes no more in one argument, and no NUL
    return text.replace("\x00", "")[:30_000]
