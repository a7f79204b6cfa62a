"""Ownership of folders: relpos marks the folders that it writes to, and locks them while it works there.

A folder without the mark belongs to the user. relpos refuses to write there if a file that it needs exists
already, and leaves all other files alone.
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


def is_marked(folder: Path) -> bool:
    """Whether relpos has marked `folder` as its own."""
    return os.path.lexists(folder / _MARK)


def format_of(folder: Path, kind: str) -> int | None:
    """The format number of a folder that is marked as a `kind`; None without a mark.

    Raises:
        InputError: the mark cannot be read, is of another kind, or was written by a later relpos.
    """
    if not is_marked(folder):
        return None
    if (folder / _MARK).is_symlink():
        raise InputError(f"{folder / _MARK} must be a regular file; got a link. Choose another folder.")
    try:
        mark = read_object(folder / _MARK)
        found, number = str(mark["folder"]), int(mark["format"])
    except (ModelFolderError, ValueError, TypeError, KeyError, OverflowError):
        raise InputError(
            f"{folder / _MARK}: cannot be read, so the folder's owner is unknown. Choose another folder."
        ) from None
    if found != kind:
        raise InputError(
            f"{folder} must be a relpos folder of kind {kind}; got kind {found}. Choose another folder."
        )
    if number > FORMAT:
        raise InputError(f"{folder} was made by a later relpos (format {number}). Upgrade relpos.")
    return number


def check_free(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Refuse a folder in which a user's file has one of `names`. Raises: InputError."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"{folder} is a link to nothing. Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: must be a folder; got a file. Choose another folder.")
    if format_of(folder, kind) is not None:
        return
    taken = [name for name in names if os.path.lexists(folder / name)]
    # relpos leaves an empty lock file if it is stopped before it marks the folder
    if os.path.lexists(folder / _LOCK) and not _is_bare_lock(folder / _LOCK):
        taken.append(_LOCK)
    if taken:
        raise InputError(
            f"{folder} holds {list_names(taken)} that relpos did not write, and this {kind} needs the "
            f"name{'s' if len(taken) > 1 else ''}. Nothing was changed. Choose another folder."
        )


@contextmanager
def working_in(folder: Path, kind: str, number: int = FORMAT) -> Iterator[None]:
    """Create, mark and lock `folder`, so that no other process works in it.

    The operating system releases the lock when the process ends, even if it is killed.

    Args:
        number: format number of the folder.
    Raises:
        InputError: the folder cannot be created, or another process works in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{folder}: another process{_holder(folder)} uses this {kind}. Wait until it ends, or stop it."
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
