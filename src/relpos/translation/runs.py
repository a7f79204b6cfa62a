"""The folder of a run: begun once, resumed with the same settings from its newest complete checkpoint."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from relpos.translation.atomic_files import write_text_atomic
from relpos.translation.checkpoints import is_sealed, is_sealed_by_user, sealed_checkpoints, verify
from relpos.translation.config import FORMAT as MODEL_FORMAT
from relpos.translation.errors import InputError, ModelFolderError, list_names
from relpos.translation.ownership import FORMAT, check_free, format_of, working_in
from relpos.translation.recipe import Recipe, load_recipe, recipe_text, write_recipe
from relpos.translation.run_cleanup import foreign_checkpoints, remove_beginning, remove_unfinished
from relpos.translation.strict_json import MEBIBYTE, check_regular, read_object
from relpos.translation.tokenizer import MARKS
from relpos.translation.weights import read_header

_KIND = "run"
_NAMES = ("recipe.yaml", "data.json", "tokenizer", "checkpoints", "metrics.jsonl", "logs", "cache", "model")
_FINISHED = "finished"
_SAME_SECTIONS = ("data", "tokenizer", "model")
# settings of `training` that must not change on resuming, since the updates made depend on them
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
    """A run ready to train: the checkpoint to continue from, if any, and whether training is finished.

    `format` is the format of its folder; 1 is a run from before folders were marked, whose schedule begins at
    step 0.
    """

    checkpoint: Path | None
    is_finished: bool
    format: int = FORMAT


def check_new(run: Path) -> None:
    """Refuse a folder in which a run cannot begin. Writes nothing.

    Raises:
        InputError: the folder has a run already, or a user's file with a name that a run needs.
    """
    if _format_of(run) is None:
        check_free(run, _KIND, _NAMES)
        return
    if has_begun(run):
        raise InputError(f"{run} holds a run already. Add --resume to continue it, or choose another --out.")
    _refuse_links(run)
    # the files of a run that failed early are replaced, but not a user's files
    taken = [name for name, is_ours in _ARE_OURS.items() if (run / name).exists() and not is_ours(run / name)]
    if taken:
        raise InputError(
            f"{run} holds {list_names(taken)} that this run did not write. Move it elsewhere first."
        )
    _refuse_foreign(run / "checkpoints")


@contextmanager
def working_in_run(run: Path) -> Iterator[None]:
    """Create and lock the folder `run`. Raises: InputError."""
    # a run without a checkpoint gets the present format
    begun_as = _format_of(run) if has_begun(run) else None
    with working_in(run, _KIND, begun_as or FORMAT):
        yield


def begin_run(recipe: Recipe, run: Path) -> OpenRun:
    """Begin a new run in its folder, and remove a run that failed before its first checkpoint.

    Raises:
        InputError: as `check_new`. OSError: the folder cannot be written.
    """
    check_new(run)
    remove_beginning(run)
    write_recipe(recipe, run / "recipe.yaml")
    return OpenRun(None, is_finished=False)


def check_resumable(run: Path) -> None:
    """Refuse a folder without a run of relpos. Writes nothing. Raises: InputError."""
    if _format_of(run) is None or not (run / "recipe.yaml").is_file():
        raise InputError(f"{run} holds no run to resume. Omit --resume to begin one.")
    _refuse_links(run)


def check_format(run: Path, recipe: Recipe) -> None:
    """Refuse to continue a run whose model has an older format. Writes nothing.

    A run that is finished by `recipe`, and has its model, is not refused: nothing of it is loaded.

    Raises:
        InputError: the newest checkpoint that can be read has an older format.
    """
    newest = _newest_readable(sealed_checkpoints(run / "checkpoints"))
    if newest is None or not read_header(newest).is_old:
        return
    before = load_recipe(str(run / "recipe.yaml"))
    if has_model(run, recipe) and _is_finished(newest, before, recipe):
        return
    trained = shlex.quote(str(run if is_sealed(run / "model") else newest))
    raise InputError(
        f"{newest}: its model must have format {MODEL_FORMAT} to be trained on; got an older one. Train "
        "anew with another --out. To keep what was trained, convert it: relpos convert "
        f"{trained} --out FOLDER"
    )


def resume_run(recipe: Recipe, run: Path, report: Callable[[str], None]) -> OpenRun:
    """Find the checkpoint to continue from, and remove incomplete ones.

    Damaged checkpoints are skipped.

    Raises:
        InputError: the run has other settings, its model was changed, or every checkpoint is damaged.
    """
    check_resumable(run)
    check_format(run, recipe)
    written = run / "recipe.yaml"
    before = load_recipe(str(written))
    _check_same(before, recipe, run)
    _check_model(run / "model")
    _refuse_foreign(run / "checkpoints")
    lines = _read_metrics(run / "metrics.jsonl")
    remove_unfinished(run)
    _tell_foreign(run / "checkpoints", report)
    checkpoint = _newest_undamaged(sealed_checkpoints(run / "checkpoints"), report)
    updates = 0 if checkpoint is None else updates_of(checkpoint)
    _cut_metrics(run / "metrics.jsonl", lines, updates)
    if before != recipe:
        write_recipe(recipe, written)
    is_finished = checkpoint is not None and _is_finished(checkpoint, before, recipe)
    return OpenRun(checkpoint, is_finished, format_of(run, _KIND) or FORMAT)


def has_begun(run: Path) -> bool:
    """Whether the folder has a run with a checkpoint or a model, which beginning again would lose."""
    return _format_of(run) is not None and (
        is_sealed(run / "model") or bool(sealed_checkpoints(run / "checkpoints"))
    )


def has_model(run: Path, recipe: Recipe) -> bool:
    """Whether `run` has a complete model that was trained by `recipe`."""
    return is_sealed(run / "model") and _is_same(load_recipe(str(run / "model" / "recipe.yaml")), recipe)


def mark_finished(checkpoint: Path) -> None:
    """Mark a checkpoint, before it is sealed, as the end of training."""
    (checkpoint / _FINISHED).touch()


def updates_of(checkpoint: Path) -> int:
    """The number of updates before `checkpoint` was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def _is_finished(checkpoint: Path, before: Recipe, recipe: Recipe) -> bool:
    """Whether training by `recipe` ends at `checkpoint` of the run begun by the recipe `before`."""
    return updates_of(checkpoint) >= recipe.training.updates or (
        (checkpoint / _FINISHED).exists()
        and _is_same(before, recipe)
        # not if a later checkpoint was skipped
        and checkpoint == sealed_checkpoints(checkpoint.parent)[-1]
    )


def _is_same(before: Recipe, recipe: Recipe) -> bool:
    """Whether two recipes are equal except for the data folder, which may be moved."""
    data = before.data.model_copy(update={"folder": recipe.data.folder})
    return before.model_copy(update={"data": data}) == recipe


def _check_same(before: Recipe, recipe: Recipe, run: Path) -> None:
    pairs = [(name, getattr(before, name), getattr(recipe, name)) for name in _SAME_SECTIONS]
    compared = [
        (f"{section}.{key}", getattr(then, key), getattr(now, key))
        for section, then, now in pairs
        for key in type(then).model_fields
        # the data folder may be moved, since the run has its text in its cache
        if (section, key) != ("data", "folder")
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


def _newest_readable(checkpoints: list[Path]) -> Path | None:
    for checkpoint in reversed(checkpoints):
        with suppress(ModelFolderError):
            read_header(checkpoint)
            return checkpoint
    return None


def _newest_undamaged(checkpoints: list[Path], report: Callable[[str], None]) -> Path | None:
    faults = []
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint)
        except InputError as error:
            faults.append(str(error))
            report(f"skipped: {error}")
        else:
            return checkpoint
    if faults:
        raise InputError(f"every checkpoint is damaged: {faults[0]}")
    return None


def _format_of(run: Path) -> int | None:
    """The format of a run: that of its mark, or 1 for a run from before marks; None for other folders."""
    marked = format_of(run, _KIND)
    if marked is not None:
        return marked
    try:
        load_recipe(str(run / "recipe.yaml"))
    except InputError:
        return None
    return 1 if _is_our_summary(run / "data.json") else None


def _check_model(model: Path) -> None:
    """Refuse to resume if the model in the run, which would be replaced, was not written by it."""
    if not model.exists():
        return
    advice = "Resuming replaces it. Move it elsewhere first."
    if not is_sealed(model) or is_sealed_by_user(model):
        raise InputError(f"{model} was not written by this run. {advice}")
    try:
        verify(model)
    except InputError as error:
        raise InputError(f"the model was changed after its training: {error} {advice}") from error


def _refuse_links(run: Path) -> None:
    """Refuse links with the names of a run's files, since writing would change their targets."""
    for name in ("recipe.yaml", "data.json", "metrics.jsonl"):
        if (run / name).is_symlink():
            raise InputError(f"{run / name} must be a regular file; got a link. Move it elsewhere first.")


def foreign_message(paths: list[Path]) -> str:
    """The error message for paths with the names of checkpoints that a run did not save."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more} was not saved by this run, which may need this name. Move it elsewhere first."


def _refuse_foreign(checkpoints: Path) -> None:
    foreign = foreign_checkpoints(checkpoints)
    if foreign:
        raise InputError(foreign_message(foreign))


def _is_our_recipe(file: Path) -> bool:
    """Whether `write_recipe` wrote the file: every key, in order, without comments."""
    try:
        recipe = load_recipe(str(file))
        return recipe_text(recipe) == file.read_text("utf-8")
    except (InputError, OSError, ValueError):
        return False


def _is_our_summary(file: Path) -> bool:
    try:
        return {"kept", "dropped", "cleaning", "pairs"} <= read_object(file, 16 * MEBIBYTE).keys()
    except InputError:
        return False


def _are_our_metrics(file: Path) -> bool:
    try:
        return bool(_read_metrics(file)) or not file.stat().st_size
    except (InputError, OSError):
        return False


def _is_our_tokenizer(folder: Path) -> bool:
    file = folder / "tokenizer.json"
    try:
        content = read_object(file, 256 * MEBIBYTE, is_deep=True) if file.exists() else None
        return content is None or MARKS[0] in content["model"]["vocab"]
    except (InputError, TypeError, KeyError):
        return False


# tests of the files that a run writes before its first checkpoint, and replaces
_ARE_OURS: dict[str, Callable[[Path], bool]] = {
    "recipe.yaml": _is_our_recipe,
    "data.json": _is_our_summary,
    "metrics.jsonl": _are_our_metrics,
    "tokenizer": _is_our_tokenizer,
    "model": lambda path: False,
}


def _tell_foreign(checkpoints: Path, report: Callable[[str], None]) -> None:
    known = {path.name for path in sealed_checkpoints(checkpoints)}
    for path in sorted(checkpoints.glob("*")):
        if path.name not in known:
            report(f"ignored: {path} is not a checkpoint of this run")


def _read_metrics(file: Path) -> list[tuple[int, str]]:
    """The lines of a metrics file, each with its update; an incomplete last line is dropped.

    Raises:
        InputError: a line is not a record.
    """
    if not file.exists():
        return []
    check_regular(file)
    found = []
    with file.open("rb") as opened:
        # a valid line has a few hundred bytes
        for number, raw in enumerate(iter(lambda: opened.readline(MEBIBYTE), b""), start=1):
            if not raw.endswith(b"\n") and len(raw) < MEBIBYTE:
                break
            try:
                line = raw.decode("utf-8").rstrip("\n")
                found.append((int(json.loads(line)["step"]), line))
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
                raise InputError(
                    f"{file} line {number} is damaged, or not written by relpos. Delete that line or move "
                    "the file, and continue with --resume."
                ) from None
    return found


def _cut_metrics(file: Path, lines: list[tuple[int, str]], last_step: int) -> None:
    """Drop the lines of updates after `last_step`, which will be repeated."""
    kept = "".join(f"{line}\n" for step, line in lines if step <= last_step)
    if file.exists() and file.read_bytes() != kept.encode():
        write_text_atomic(file, kept)
