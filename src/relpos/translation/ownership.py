"""Folders that relpos writes into: marked as its own, and locked by the process that works in them.

A folder without the mark belongs to somebody else. What relpos would write there is refused where something
has that name already; everything else in the folder is left alone.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from relpos.translation.atomic_files import write_text_atomic
from relpos.translation.errors import InputError, ModelFolderError, list_names
from relpos.translation.strict_json import read_object

FORMAT = 2  # 1: before folders were marked
_MARK, _LOCK = "relpos.json", "relpos.lock"


def format_of(folder: Path, kind: str) -> int | None:
    """The format of a folder that relpos marked as a `kind`; None where it has no mark.

    Raises:
        InputError: the mark cannot be read, is of another kind, or of a later relpos.
    """
    if not os.path.lexists(folder / _MARK):
        return None
    if (folder / _MARK).is_symlink():
        raise InputError(f"{folder / _MARK} is a link, and is written to. Choose another folder.")
    try:
        mark = read_object(folder / _MARK)
        found, number = str(mark["folder"]), int(mark["format"])
    except (ModelFolderError, ValueError, TypeError, KeyError, OverflowError):
        raise InputError(
            f"{folder / _MARK}: cannot be read, so that relpos does not know whether the folder is its own. "
            "Choose another folder."
        ) from None
    if found != kind:
        raise InputError(f"{folder} is the folder of another thing, {found}. Choose another for this {kind}.")
    if number > FORMAT:
        raise InputError(f"{folder} was made by a later relpos (format {number}). Upgrade relpos.")
    return number


def check_free(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Refuse a folder where something that relpos did not write has one of `names`. Raises: InputError."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"{folder} is a link to nothing. Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: cannot be made, a file has that name. Choose another folder.")
    if format_of(folder, kind) is not None:
        return
    taken = [name for name in names if os.path.lexists(folder / name)]
    # an empty one is of a relpos that was stopped before it could mark the folder
    if os.path.lexists(folder / _LOCK) and not _is_bare_lock(folder / _LOCK):
        taken.append(_LOCK)
    if taken:
        raise InputError(
            f"{folder} holds {list_names(taken)} that relpos did not write, and this {kind} needs the "
            f"name{'s' if len(taken) > 1 else ''}. Nothing was changed. Choose another folder."
        )


@contextmanager
def working_in(folder: Path, kind: str, number: int = FORMAT) -> Iterator[None]:
    """Make and mark `folder` where that was not done, and be the only process that works in it.

    The lock is the operating system's, which releases it when the process ends, however it ends.

    Args:
        number: format of what is in it, or will be.
    Raises:
        InputError: the folder cannot be made, or another process works in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{folder}: another process{_holder(folder)} works in this {kind}. Wait for its end, or stop it."
        ) from None
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made or written to ({error.strerror}). Choose another folder."
        ) from error
    try:
        format_of(folder, kind)
        mark = {"folder": kind, "format": number, "process": os.getpid()}
        write_text_atomic(folder / _MARK, json.dumps(mark) + "\n")
        yield
    finally:
        lock.release()


def _is_bare_lock(lock: Path) -> bool:
    return lock.is_file() and not lock.is_symlink() and lock.stat().st_size == 0


def _holder(folder: Path) -> str:
    try:
        return f" ({read_object(folder / _MARK)['process']})"
    except (InputError, KeyError):
        return ""
