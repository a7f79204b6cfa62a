"""The folder of a run: begun once, resumed only as what it was, from its newest whole checkpoint."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relpos.translation.checkpoints import is_sealed, sealed_checkpoints, verify
from relpos.translation.errors import InputError
from relpos.translation.files import write_text_whole
from relpos.translation.recipe import Recipe, load_recipe, write_recipe

_FINISHED = "finished"
_SAME_SECTIONS = ("data", "tokenizer", "model")
# with other values of these the updates that were made would not be those of this recipe
_SAME_TRAINING = (
    "seed",
    "tokens_per_batch",
    "accumulation",
    "max_length",
    "precision",
    "warmup",
    "learning_rate_scale",
    "adam_betas",
    "adam_epsilon",
    "max_gradient_norm",
    "label_smoothing",
    "best",
)


@dataclass(frozen=True)
class OpenRun:
    """A run ready to train: the checkpoint to go on from, if any, and whether nothing is left to train.

    `format` is 1 for runs begun when the schedule's first step was 0, else 2.
    """

    checkpoint: Path | None
    is_finished: bool
    format: int = 2


def begin_run(recipe: Recipe, run: Path) -> OpenRun:
    """Make the folder of a new run. What failed there before its first checkpoint gives way.

    Raises:
        InputError: the folder holds a run already, or cannot be made.
    """
    if has_begun(run):
        raise InputError(f"{run} holds a run already. Add --resume to go on, or choose another --out.")
    for name in ("checkpoints", "tokenizer", "logs"):
        shutil.rmtree(run / name, ignore_errors=True)
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{run}: cannot be made ({error.strerror}). Choose another --out.") from error
    write_recipe(recipe, run / "recipe.yaml")
    return OpenRun(None, is_finished=False)


def resume_run(recipe: Recipe, run: Path, report: Callable[[str], None]) -> OpenRun:
    """Find where to go on in `run`; what was not finished there is removed.

    A checkpoint that was damaged is passed over, and the one before it is taken.

    Raises:
        InputError: there is no run, it is another one, or every checkpoint is damaged.
    """
    written = run / "recipe.yaml"
    if not written.is_file():
        raise InputError(f"{run} holds no run to resume. Leave --resume out to begin one.")
    before = load_recipe(str(written))
    _check_same(before, recipe, run)
    if before != recipe:
        write_recipe(recipe, written)
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        if not is_sealed(folder):
            shutil.rmtree(folder)
    checkpoint = _newest_undamaged(sealed_checkpoints(run / "checkpoints"), report)
    _cut_metrics(run / "metrics.jsonl", 0 if checkpoint is None else updates_of(checkpoint))
    is_finished = checkpoint is not None and (
        updates_of(checkpoint) >= recipe.training.updates
        or ((checkpoint / _FINISHED).exists() and before == recipe)
    )
    return OpenRun(checkpoint, is_finished)


def has_begun(run: Path) -> bool:
    """Whether `run` holds a checkpoint or a model, so that something would be lost by beginning again."""
    return (run / "model").exists() or bool(sealed_checkpoints(run / "checkpoints"))


def mark_finished(checkpoint: Path) -> None:
    """Note in a checkpoint, before it is sealed, that training came to its end with it."""
    (checkpoint / _FINISHED).touch()


def updates_of(checkpoint: Path) -> int:
    """Updates that were made when `checkpoint` was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def _check_same(before: Recipe, recipe: Recipe, run: Path) -> None:
    pairs = [(name, getattr(before, name), getattr(recipe, name)) for name in _SAME_SECTIONS]
    compared = [
        (f"{section}.{key}", getattr(then, key), getattr(now, key))
        for section, then, now in pairs
        for key in type(then).model_fields
    ]
    compared += [
        (f"training.{key}", getattr(before.training, key), getattr(recipe.training, key))
        for key in _SAME_TRAINING
    ]
    for key, then, now in compared:
        if then != now:
            raise InputError(
                f"{run} was begun with other settings: {key} was {then}, and is {now} now. "
                f"Resume with {run / 'recipe.yaml'}, or choose another --out."
            )


def _newest_undamaged(checkpoints: list[Path], report: Callable[[str], None]) -> Path | None:
    faults = []
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint)
        except InputError as error:
            faults.append(str(error))
            report(f"passed over: {error}")
        else:
            return checkpoint
    if faults:
        raise InputError(f"every checkpoint is damaged: {faults[0]}")
    return None


def _cut_metrics(file: Path, last_step: int) -> None:
    """Forget the lines of updates that will be made again, and a line cut short by a kill."""
    if file.is_file():
        lines = file.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last_step]
        if kept != lines:
            write_text_whole(file, "".join(kept))
