"""Lines of a text file or of standard input, plain or gzipped, in UTF-8.

Only a line feed ends a line: the signs that `str.splitlines` also breaks at (U+2028, form feed, ...) stay
inside. What cannot be read is an `InputError` that names the file, the line and the byte.
"""

from __future__ import annotations

import errno
import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from relpos.translation.corpora.foreign import HEAD_BYTES, foreign_kind
from relpos.translation.errors import InputError

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_lines(file: Path | BinaryIO) -> Iterator[str]:
    """Yield the lines of UTF-8 text without their ends; byte-order mark and Windows line ends are tolerated.

    Args:
        file: a path, or an open stream such as `sys.stdin.buffer`, which stays open; gzip is recognised by
            its first two bytes, whatever the name.
    Raises:
        InputError: the file is missing, a folder, unreadable, a damaged gzip, or not UTF-8.
    """
    name = str(file) if isinstance(file, Path) else "standard input"
    offset = 0
    try:
        with _open(file, name) as stream:
            for number, raw in enumerate(stream, start=1):
                start = offset
                offset += len(raw)
                if number == 1 and raw.startswith(_BYTE_ORDER_MARK):
                    raw = raw[len(_BYTE_ORDER_MARK) :]
                    start += len(_BYTE_ORDER_MARK)
                line = raw[:-1] if raw.endswith(b"\n") else raw
                line = line[:-1] if line.endswith(b"\r") else line
                yield _decode(line, name, number, start)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{name} is damaged or truncated gzip (readable up to byte {offset} of its text); "
            "copy or download it again."
        ) from error
    except OSError as error:
        if error.errno == errno.EBADF:
            raise InputError(f"{name} is closed; name a file, or give it one.") from error
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}; check the path and its rights."
        ) from error


def check_is_file(path: Path) -> None:
    """Raise the `InputError` that fits where `path` is no file that exists."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, and a file was expected; name one of the files in it.")
    if not path.exists():
        raise InputError(f"{path} does not exist (seen from {Path.cwd()}); check the path.")


@contextmanager
def _open(file: Path | BinaryIO, name: str) -> Iterator[Iterable[bytes]]:
    """Give the lines of a path or a stream, unpacked; a stream is left open."""
    with ExitStack() as stack:
        if isinstance(file, Path):
            check_is_file(file)
            file = stack.enter_context(file.open("rb"))
        # a stream that cannot look ahead is taken as plain
        peek = getattr(file, "peek", lambda size: b"")
        is_gzip = peek(len(_GZIP))[: len(_GZIP)] == _GZIP
        unpacked = stack.enter_context(gzip.open(file)) if is_gzip else None
        if kind := foreign_kind(unpacked.peek(HEAD_BYTES) if unpacked else peek(HEAD_BYTES)):
            raise InputError(f"{name}{' (unpacked)' if is_gzip else ''} {kind}.")
        yield unpacked or file


def _decode(line: bytes, name: str, number: int, start: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        looks, encoding = "", "LATIN1"
        if number == 1 and line[:2] in _UTF16_MARKS:
            looks, encoding = " and looks like UTF-16", "UTF-16"
        advice = f"convert it with, for example, `iconv -f {encoding} -t UTF-8`"
        if b"\0" in line and not looks:
            advice = "it is UTF-16 without its mark, or no text"
        raise InputError(
            f"{name} is not UTF-8{looks}: line {number} has byte 0x{line[error.start]:02x} "
            f"at byte offset {start + error.start}; {advice}."
        ) from error
