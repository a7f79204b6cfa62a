"""Atomic writes: a file or folder is replaced as a whole or not at all, even if the writer is killed.

Unfinished content is a draft beside the target, under a new name.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeVar

_DRAFT = ".relpos-draft-"
_IS_DRAFT = re.compile(r"\.(.+)\.relpos-draft-[0-9a-f]{16}")
_T = TypeVar("_T")


@contextmanager
def open_atomic(path: Path) -> Iterator[TextIO]:
    """Open a file for UTF-8 text that replaces `path` when the block ends without an exception.

    The target of a symbolic link is replaced, and the link stays; permissions stay too. An existing device or
    pipe is written to directly.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():
        with _closed(path.open("w", encoding="utf-8", newline="\n")) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    if path.exists() and not os.access(path, os.W_OK):
        # a rename would replace a read-only file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    draft, opened = _new(path, lambda name: name.open("x", encoding="utf-8", newline="\n"))
    try:
        with _closed(opened) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8; a kill or a full disk leaves the old content.

    Raises:
        OSError: the file cannot be written; names `path`.
    """
    try:
        with open_atomic(path) as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_folder_atomic(
    folder: Path, write: Callable[[Path], object], is_ours: Callable[[Path], bool] = lambda path: True
) -> None:
    """Fill a new folder with `write`, and replace `folder` by it; all or nothing.

    Args:
        is_ours: whether a path in the old folder may be dropped; other paths are copied to the new one.
    Raises:
        OSError: the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft, _ = _new(folder, Path.mkdir)
    try:
        write(draft)
        for path in folder.iterdir() if folder.is_dir() else ():
            if not is_ours(path) and not (draft / path.name).exists():
                _copy(path, draft / path.name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if not folder.exists():
        draft.rename(folder)
        return
    # the old folder is removed only after the new one has taken its place
    old, _ = _new(folder, Path.mkdir)
    folder.rename(old / folder.name)
    try:
        draft.rename(folder)
    except BaseException:
        (old / folder.name).rename(folder)
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def link_folder(folder: Path, to: Path) -> None:
    """Link every file of `folder` into `to`, so that new files can be written to `to` only."""
    for path in folder.rglob("*"):
        place = to / path.relative_to(folder)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif path.suffix != ".lock":
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                place.symlink_to(path.absolute())
            except OSError:  # Windows restricts symbolic links
                shutil.copyfile(path, place)


def remove_drafts(folder: Path, names: Container[str]) -> None:
    """Remove drafts of `names` that killed processes left in `folder`; no other process may write there."""
    for path in list(folder.glob(f".*{_DRAFT}*")):
        draft = _IS_DRAFT.fullmatch(path.name)
        if draft is None or draft[1] not in names or path.is_symlink():
            continue
        if path.is_dir():
            _restore(path, draft[1])
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _restore(draft: Path, name: str) -> None:
    """Restore a folder that was moved away by a process that was killed before replacing it."""
    if (draft / name).is_dir() and not draft.with_name(name).exists():
        (draft / name).rename(draft.with_name(name))


def _new(path: Path, make: Callable[[Path], _T]) -> tuple[Path, _T]:
    """A new path beside `path`, and the result of `make` for it; `make` must fail if the path exists."""
    while True:
        # a name has at most 255 bytes
        draft = path.with_name(f".{path.name[:50]}{_DRAFT}{secrets.token_hex(8)}")
        with suppress(FileExistsError):
            return draft, make(draft)


def _copy(path: Path, to: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, to, symlinks=True)
    else:
        shutil.copy2(path, to, follow_symlinks=False)


@contextmanager
def _closed(file: TextIO) -> Iterator[TextIO]:
    try:
        yield file
    except BaseException:
        # closing fails again after a failed write, and would hide the first error
        with suppress(OSError):
            file.close()
        raise
    file.close()
