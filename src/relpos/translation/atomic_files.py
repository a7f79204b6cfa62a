"""Files and folders that are whole at any moment, whatever stops the writer.

What is not finished yet lies beside its place as a draft, under a name that nothing had before.
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
    """A file to write UTF-8 text to; it takes the place of what is at `path` when the block ends well.

    A symbolic link stays one, and what it points to is replaced; the permissions of what is replaced stay.
    What exists and is no regular file, a device or a pipe, is written to directly.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        with _closed(path.open("w", encoding="utf-8", newline="\n")) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    if path.exists() and not os.access(path, os.W_OK):
        # its folder would let it be replaced
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
    """Write `text` to `path`, UTF-8; a kill or a full disk leaves there what was there before.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    try:
        with open_atomic(path) as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_folder_atomic(
    folder: Path, write: Callable[[Path], object], is_ours: Callable[[Path], bool] = lambda path: True
) -> None:
    """Let `write` fill a new folder and put it in the place of `folder`; all or nothing.

    Args:
        is_ours: of what stands in the folder that is replaced, by its path; the rest is copied over.
    Raises:
        OSError: it cannot be written.
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
    # the old folder goes only when the new one is in its place
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
    """Link every file of `folder` in `to`, where others may be written beside them."""
    for path in folder.rglob("*"):
        place = to / path.relative_to(folder)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif path.suffix != ".lock":
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                place.symlink_to(path.absolute())
            except OSError:  # Windows lets few users make links
                shutil.copyfile(path, place)


def remove_drafts(folder: Path, names: Container[str]) -> None:
    """Remove the drafts of `names` in `folder` that killed processes left; no other may be writing there."""
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
    """Put a folder back that was moved away, where a kill came before the new one took its place."""
    if (draft / name).is_dir() and not draft.with_name(name).exists():
        (draft / name).rename(draft.with_name(name))


def _new(path: Path, make: Callable[[Path], _T]) -> tuple[Path, _T]:
    """What `make` makes under a new name beside `path`, and that name; `make` fails where something is."""
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
        # what could not be written fails once more, and would hide what came first
        with suppress(OSError):
            file.close()
        raise
    file.close()
