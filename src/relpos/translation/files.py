"""Text files that are whole at any moment, whatever stops the writer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


@contextmanager
def open_whole(path: Path) -> Iterator[TextIO]:
    """A file to write UTF-8 text to; it takes the place of what is at `path` when the block ends well.

    A symbolic link stays one, and what it points to is replaced. What exists and is no regular file, a
    device or a pipe, is written to directly.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        with _open(path) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    draft = path.with_name(path.name + ".part")
    try:
        with _open(draft) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, UTF-8; a kill or a full disk leaves there what was there before.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    try:
        with open_whole(path) as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    file = path.open("w", encoding="utf-8", newline="\n")
    try:
        yield file
    except BaseException:
        # what could not be written fails once more, and would hide what came first
        with suppress(OSError):
            file.close()
        raise
    file.close()
