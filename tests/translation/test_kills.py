"""Kills at any moment: what is trained in the end is bit for bit that of an unbroken run."""

import importlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relpos.translation.checkpoints import is_sealed, seal, verify
from relpos.translation.recipe import check_recipe
from relpos.translation.run_cleanup import foreign_checkpoints, remove_checkpoint, remove_unfinished
from relpos.translation.runs import has_begun
from relpos.translation.training import train
from small_runs import read_metrics, small_values

KILLS = 60
# what a kill may fall into: the module that calls a function, the function, how often a run calls it, and the
# longest time after its call, in seconds
PHASES = {
    "reading": ("relpos.translation.preparation", "clean", 1, 0.05),
    "tokenizer": ("relpos.translation.preparation", "train_tokenizer", 1, 0.05),
    "saved tokenizer": ("relpos.translation.preparation", "save_tokenizer", 1, 0.01),
    "validation": ("relpos.translation.trainer", "RelposTrainer.evaluate", 4, 0.2),
    "saving": ("relpos.translation.trainer", "RelposTrainer._save_checkpoint", 4, 0.05),
    "sealing": ("relpos.translation.trainer", "seal", 4, 0.005),
    "removal": ("relpos.translation.trainer", "keep_newest", 4, 0.003),
    "model": ("relpos.translation.training", "save_sealed", 2, 0.02),
    "training": ("relpos.translation.trainer", "RelposTrainer.training_step", 12, 0.02),
}


def _values() -> dict[str, Any]:
    return small_values(updates=12, evaluate_every=3, keep=1, average=2, best="loss")


def _killed_in(phase: str, call: int, delay: float, run: str, resume: bool) -> None:
    """Train, and die `delay` seconds after the `call`-th call of a phase."""
    module, path, *_ = PHASES[phase]
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    wrapped, calls = getattr(owner, name), iter(range(1, 10_000))

    def die() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def noted(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            threading.Thread(target=die).start()
        return wrapped(*args, **options)

    setattr(owner, name, noted)
    _train(run, resume)


def _train(run: str, resume: bool) -> None:
    train(check_recipe(_values(), "small"), Path(run), resume=resume)


def _same_ends(run: Path, unbroken: Path) -> None:
    for name in ("loss", "eval_loss", "eval_bleu", "eval_chrf"):
        assert read_metrics(run, name) == read_metrics(unbroken, name)
    saved = [path.relative_to(unbroken) for path in (unbroken / "checkpoints").iterdir()]
    assert len(saved) == 2
    for folder in (*saved, Path("model")):
        verify(run / folder)
        weights = folder / "model.safetensors"
        assert (run / weights).read_bytes() == (unbroken / weights).read_bytes()
    assert not list(run.rglob(".*"))  # no drafts


def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_foreign(tmp_path, monkeypatch) -> None:
    unlink, kills = Path.unlink, 0
    for most in range(9):
        run = tmp_path / str(most)
        folder = run / "checkpoints" / "checkpoint-3"
        names = ("config.json", "model.safetensors", "optimizer.pt", "trainer_state.json", "mine.txt")
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(name)
        seal(folder, lambda name: name != "mine.txt")
        left = [most]

        def killed(path: Path, missing_ok: bool = False, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed)
            try:
                remove_checkpoint(folder)
            except KeyboardInterrupt:
                kills += 1
                assert not foreign_checkpoints(folder.parent)
        if not is_sealed(folder):
            remove_unfinished(run)
            assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert 5 < kills < 9


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing_in_the_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relpos.translation.training", "torch.utils.tensorboard"])

    def process(target: Callable[..., None], *arguments: Any) -> int:
        child = context.Process(target=target, args=arguments)
        child.start()
        child.join(240)
        assert child.exitcode is not None
        return child.exitcode

    assert process(_train, str(tmp_path / "unbroken"), False) == 0
    draw, killed, runs = random.Random(20261130), dict.fromkeys(PHASES, 0), 0
    while sum(killed.values()) < KILLS:
        run, runs = tmp_path / f"run {runs}", runs + 1
        mine = [run / "thesis.txt", run / "checkpoints" / "checkpoint-6-mine" / "model.safetensors"]
        _train_beside(run, mine, process, draw, killed)
        _same_ends(run, tmp_path / "unbroken")
        assert [path.read_text() for path in mine] == ["mine", "mine"]
    print({"kills": sum(killed.values()), "runs": runs, **killed})
    assert min(killed.values()) >= 2


def _train_beside(
    run: Path, mine: list[Path], process: Callable[..., int], draw: random.Random, killed: dict[str, int]
) -> None:
    """A run that is killed up to eight times and then finished, beside files that are not its own."""
    for attempt in range(8):
        if attempt == 1:
            for path in mine:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("mine")
        phase = min(PHASES, key=lambda name: (killed[name], draw.random()))
        *_, most, longest = PHASES[phase]
        resume = has_begun(run) or (attempt > 0 and draw.random() < 0.5 and (run / "recipe.yaml").exists())
        code = process(_killed_in, phase, draw.randint(1, most), draw.uniform(0, longest), str(run), resume)
        assert code in (0, -signal.SIGKILL), (phase, code)
        killed[phase] += code != 0
        if code == 0 and attempt > 0:
            break
    assert process(_train, str(run), has_begun(run)) == 0
