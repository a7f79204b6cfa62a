"""What relpos removes of a run: files that it wrote, by their names, and folders only when that empties them.

Whatever else a person put there stays.
"""

import re
from pathlib import Path

from relpos.translation.atomic_files import remove_drafts
from relpos.translation.checkpoints import is_sealed, is_sealed_by_user, sealed_checkpoints, sealed_names

# the folder of tables in a run's cache
TABLES = "relpos-tables"
# in a checkpoint's folder while it is being saved: without it, and without a seal, the folder is another's
SAVING = ".relpos-saving"

_TOKENIZER = r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
# what transformers' Trainer, tokenizers and this package write into a checkpoint
_CHECKPOINT = re.compile(
    rf"{_TOKENIZER}|config\.json|generation_config\.json|model(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors"
    r"|model\.safetensors\.index\.json|training_args\.bin|trainer_state\.json|optimizer\.(pt|bin)"
    rf"|scheduler\.pt|scaler\.pt|rng_state(_[0-9]+)?\.pth|finished|seal\.json|{re.escape(SAVING)}"
)
# what `datasets` writes into a folder of tables, and what is remembered of them
_TABLE = re.compile(r".*\.arrow|.*\.lock|dataset_info\.json|tables\.json")
_DRAFTS = ("model", "tokenizer", "recipe.yaml", "data.json", "metrics.jsonl", "relpos.json")


def remove_checkpoint(folder: Path) -> None:
    """Remove what saving wrote into `folder`, whole or not; nothing behind a link. Raises: OSError."""
    if folder.is_symlink():
        return
    names = sealed_names(folder)
    # first of all, so that what a kill leaves is never taken for whole
    (folder / "seal.json").unlink(missing_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for inner in sorted({parent for name in names for parent in Path(name).parents}, reverse=True):
        if inner != Path() and (folder / inner).is_dir() and not any((folder / inner).iterdir()):
            (folder / inner).rmdir()
    remove_drafts(folder, ("seal.json",))
    _remove(folder, _CHECKPOINT)


def remove_links(folder: Path) -> None:
    """Remove the links in `folder` under names that saving writes, which would be written where they lead."""
    for path in folder.glob("*"):
        if path.is_symlink() and _CHECKPOINT.fullmatch(path.name):
            path.unlink()


def keep_newest(checkpoints: Path, count: int, best: int | None) -> None:
    """Remove the older whole checkpoints beyond `count`, but not that of the update `best`, nor a user's."""
    for folder in sealed_checkpoints(checkpoints)[:-count]:
        if folder.name != f"checkpoint-{best}" and not is_sealed_by_user(folder):
            remove_checkpoint(folder)


def remove_unfinished(run: Path) -> None:
    """Remove the checkpoints in `run` whose saving did not come to its end, and drafts."""
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        if (folder / SAVING).is_file() and not is_sealed(folder):
            remove_checkpoint(folder)
    remove_drafts(run, _DRAFTS)
    remove_drafts(run / "cache" / TABLES, ("tables.json",))


def foreign_checkpoints(checkpoints: Path) -> list[Path]:
    """What has the name of a checkpoint and was saved by no run; a run would write over it."""
    return [
        path
        for path in sorted(checkpoints.glob("checkpoint-*"))
        if re.fullmatch("checkpoint-[0-9]+", path.name)
        and (path.is_symlink() or not (is_sealed(path) or (path / SAVING).is_file()))
    ]


def remove_beginning(run: Path) -> None:
    """Remove what a run wrote that failed before its first checkpoint. Raises: OSError."""
    remove_unfinished(run)
    _remove(run / "tokenizer", re.compile(_TOKENIZER))
    (run / "metrics.jsonl").unlink(missing_ok=True)
    forget_tables(run / "cache")


def remove_tables(cache: Path) -> None:
    """Remove the tables that `datasets` made in a run's cache, and the memory of what they were made from."""
    tables = cache / TABLES
    # a link leads to tables that are not in this cache
    if tables.is_symlink():
        return
    for folder in sorted((path for path in tables.rglob("*") if path.is_dir()), reverse=True):
        _remove(folder, _TABLE)
    _remove(tables, _TABLE)


def forget_tables(cache: Path) -> None:
    """Have the corpora looked at again, and read where they have changed."""
    (cache / TABLES / "tables.json").unlink(missing_ok=True)


def _remove(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files in `folder` of these names, and the folder if nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if names.fullmatch(path.name) and (path.is_file() or path.is_symlink()):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
