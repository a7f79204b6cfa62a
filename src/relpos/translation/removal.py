"""What relpos removes of a run: files that it wrote, by their names, and folders only when that empties them.

Whatever else a person put there stays.
"""

import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from relpos.translation.checkpoints import is_sealed, sealed_checkpoints, sealed_names
from relpos.translation.files import remove_drafts

# what transformers' Trainer, tokenizers and this package write into a checkpoint and a tokenizer's folder
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_CHECKPOINT = (
    *_TOKENIZER,
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "training_args.bin",
    "trainer_state.json",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "finished",
    "seal.json",
)
# folders of `datasets`: of our own tables, and of those that it reads files into
_TABLES = ("generator", "csv", "json", "parquet", "arrow", "text")


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
    remove_drafts(folder)
    _remove(folder, _CHECKPOINT)


def remove_links(folder: Path) -> None:
    """Remove the links in `folder` under names that saving writes, which would be written where they lead."""
    for path in folder.glob("*"):
        if path.is_symlink() and any(fnmatch(path.name, pattern) for pattern in _CHECKPOINT):
            path.unlink()


def keep_newest(checkpoints: Path, count: int, best: int | None) -> None:
    """Remove the older whole checkpoints beyond `count`, but not that of the update `best`."""
    for folder in sealed_checkpoints(checkpoints)[:-count]:
        if folder.name != f"checkpoint-{best}":
            remove_checkpoint(folder)


def remove_unfinished(run: Path) -> None:
    """Remove the checkpoints in `run` whose saving did not come to its end, and drafts."""
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        is_checkpoint = re.fullmatch(r"checkpoint-[0-9]+", folder.name) and not folder.is_symlink()
        if is_checkpoint and folder.is_dir() and not is_sealed(folder):
            remove_checkpoint(folder)
    for place in (run, run / "checkpoints", run / "cache"):
        remove_drafts(place)


def remove_beginning(run: Path) -> None:
    """Remove what a run wrote that failed before its first checkpoint. Raises: OSError."""
    remove_unfinished(run)
    _remove(run / "tokenizer", _TOKENIZER)
    _remove(run / "logs", ("events.out.tfevents.*",))
    _remove(run / "checkpoints", ())
    (run / "metrics.jsonl").unlink(missing_ok=True)
    forget_tables(run / "cache")


def remove_tables(cache: Path) -> None:
    """Remove the tables that `datasets` made in a run's cache, and the memory of what they were made from."""
    forget_tables(cache)
    for name in _TABLES:
        # a link leads to tables that are not in this cache
        if (cache / name).is_dir() and not (cache / name).is_symlink():
            shutil.rmtree(cache / name)


def forget_tables(cache: Path) -> None:
    """Have the corpora looked at again, and read where they have changed."""
    (cache / "tables.json").unlink(missing_ok=True)


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    """Remove the files in `folder` that match, and the folder if nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
