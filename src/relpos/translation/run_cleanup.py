"""Removes files that relpos wrote into a run, by their exact names, and folders that become empty.

A user's own files stay.
"""

import re
from pathlib import Path

from relpos.translation.atomic_files import remove_drafts
from relpos.translation.checkpoints import is_sealed, is_sealed_by_user, sealed_checkpoints, sealed_names

# the folder of tables in a run's cache
TABLES = "relpos-tables"
# marks a checkpoint that is being saved or removed; a folder without this file and a seal is not relpos's
SAVING = ".relpos-saving"

_TOKENIZER = r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
# files that transformers' Trainer, tokenizers and relpos write into a checkpoint
_CHECKPOINT = re.compile(
    rf"{_TOKENIZER}|config\.json|generation_config\.json|model(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors"
    r"|model\.safetensors\.index\.json|training_args\.bin|trainer_state\.json|optimizer\.(pt|bin)"
    r"|scheduler\.pt|scaler\.pt|rng_state(_[0-9]+)?\.pth|finished|seal\.json"
)
# files that `datasets` and relpos write into a folder of tables
_TABLE = re.compile(r".*\.arrow|.*\.lock|dataset_info\.json|tables\.json")
_DRAFTS = ("model", "tokenizer", "recipe.yaml", "data.json", "metrics.jsonl", "relpos.json")


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint, complete or not; links are not followed. Raises: OSError."""
    if folder.is_symlink():
        return
    names = sealed_names(folder) - {SAVING}
    # marked before the seal goes and until all else is gone: after a kill the rest still counts as relpos's
    if is_sealed(folder) and not (folder / SAVING).is_symlink():
        (folder / SAVING).touch()
    (folder / "seal.json").unlink(missing_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for inner in sorted({parent for name in names for parent in Path(name).parents}, reverse=True):
        if inner != Path() and (folder / inner).is_dir() and not any((folder / inner).iterdir()):
            (folder / inner).rmdir()
    remove_drafts(folder, ("seal.json",))
    _remove(folder, _CHECKPOINT)
    _remove(folder, re.compile(re.escape(SAVING)))


def remove_links(folder: Path) -> None:
    """Remove links with names that saving writes, so that saving does not write to their targets."""
    for path in folder.glob("*"):
        if path.is_symlink() and (path.name == SAVING or _CHECKPOINT.fullmatch(path.name)):
            path.unlink()


def keep_newest(checkpoints: Path, count: int, best: int | None) -> None:
    """Remove all but the newest `count` checkpoints, that of update `best`, and those a user sealed."""
    for folder in sealed_checkpoints(checkpoints)[:-count]:
        if folder.name != f"checkpoint-{best}" and not is_sealed_by_user(folder):
            remove_checkpoint(folder)


def remove_unfinished(run: Path) -> None:
    """Remove incomplete checkpoints and drafts in `run`."""
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        if (folder / SAVING).is_file() and not is_sealed(folder):
            remove_checkpoint(folder)
    remove_drafts(run, _DRAFTS)
    remove_drafts(run / "cache" / TABLES, ("tables.json",))


def foreign_checkpoints(checkpoints: Path) -> list[Path]:
    """Paths that are named like checkpoints but were not saved by a run, which would overwrite them."""
    return [
        path
        for path in sorted(checkpoints.glob("checkpoint-*"))
        if re.fullmatch("checkpoint-[0-9]+", path.name)
        and (path.is_symlink() or not (is_sealed(path) or (path / SAVING).is_file()))
    ]


def remove_beginning(run: Path) -> None:
    """Remove the files of a run that failed before its first checkpoint. Raises: OSError."""
    remove_unfinished(run)
    _remove(run / "tokenizer", re.compile(_TOKENIZER))
    (run / "metrics.jsonl").unlink(missing_ok=True)
    forget_tables(run / "cache")


def remove_tables(cache: Path) -> None:
    """Remove the tables in a run's cache, and the list of the corpora that they were made from."""
    tables = cache / TABLES
    # the target of a link is not part of this cache
    if tables.is_symlink():
        return
    for folder in sorted((path for path in tables.rglob("*") if path.is_dir()), reverse=True):
        _remove(folder, _TABLE)
    _remove(tables, _TABLE)


def forget_tables(cache: Path) -> None:
    """Forget which table belongs to which corpus, so that changed corpora are read again."""
    (cache / TABLES / "tables.json").unlink(missing_ok=True)


def _remove(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files in `folder` that match `names`, and the folder if it becomes empty."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if names.fullmatch(path.name) and (path.is_file() or path.is_symlink()):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
