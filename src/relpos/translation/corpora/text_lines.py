"""Lines of a text file or of standard input, plain or gzipped, in UTF-8.

A line ends with a line feed, with or without a carriage return before it. Other characters at which
`str.splitlines` breaks (U+2028, form feed, ...) stay in the line, and so does a stray carriage return. If the
first line ends with a carriage return alone, as on old Macs, carriage returns end lines too. Unreadable text
raises an `InputError` with the file, the line and the byte. Memory is bounded by the longest line allowed.
"""

import errno
import re
import select
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from relpos.translation.corpora.file_signatures import HEAD_BYTES, binary_format
from relpos.translation.errors import InputError

# bytes of a line without its end; far more than any useful pair has
MAX_LINE_BYTES = 4 << 20

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LINE_FEED, _ANY_END = re.compile(b"\n"), re.compile(b"\r\n|\r|\n")
_BLOCK = 1 << 16


def read_lines(file: Path | BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines of UTF-8 text without their ends; a byte-order mark and Windows line ends are accepted.

    Args:
        file: a path, or an open stream such as `sys.stdin.buffer`, which stays open. Gzip is recognised by
            its first two bytes, not by the name.
        max_line_bytes: limit on a line without its end.
    Raises:
        InputError: the file is missing, a folder, unreadable, a damaged gzip, not UTF-8, or has a line over
            the limit.
    """
    for lines in read_arrived(file, max_line_bytes):
        yield from lines


def read_arrived(
    file: Path | BinaryIO, max_line_bytes: int = MAX_LINE_BYTES, at_once: int = 1
) -> Iterator[list[str]]:
    """Yield lines as `read_lines` does, in lists of the lines that can be read without waiting.

    A list is yielded when it has `at_once` lines, at the end, and whenever the next read would block, so that
    interactive input from a pipe or a terminal is answered line by line. Lists are never empty, and have at
    most `at_once` lines plus those of one block.
    """
    name = str(file) if isinstance(file, Path) else "standard input"
    splitter = _Splitter(name, max_line_bytes)
    lines: list[str] = []
    try:
        with _open(file) as source:
            is_packed, is_first = isinstance(source, _Unpacked), True
            while block := source.read():
                if is_first and (kind := binary_format(block[:HEAD_BYTES])):
                    raise InputError(f"{name}{' (unpacked)' if is_packed else ''} {kind}.")
                is_first = False
                lines += splitter.feed(block)
                if lines and (len(lines) >= at_once or not source.is_ready()):
                    yield lines
                    lines = []
            lines += splitter.end()
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"{name} is damaged or truncated gzip (readable up to byte {splitter.offset} of its text); "
            "copy or download it again."
        ) from error
    except OSError as error:
        if error.errno == errno.EBADF:
            raise InputError(f"{name} is closed; name a file, or redirect one to it.") from error
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}; check the path and its permissions."
        ) from error
    if lines:
        yield lines


def check_is_file(path: Path) -> None:
    """Raise an InputError if `path` is not an existing file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, and a file was expected; name one of the files in it.")
    if not path.exists():
        raise InputError(f"{path} does not exist (seen from {Path.cwd()}); check the path.")


class _Splitter:
    """Splits blocks of bytes into lines; keeps an unfinished line for the next block."""

    def __init__(self, name: str, max_line_bytes: int) -> None:
        self.name, self.max_line_bytes = name, max_line_bytes
        self.number = self.offset = 0  # lines yielded so far, and their bytes
        self._kept: list[bytes] = []
        self._num_kept = 0  # bytes
        self._is_old_mac: bool | None = None  # None: no line has ended yet
        self._was_return = False  # the last byte of the block was a carriage return that ended a line

    def feed(self, block: bytes) -> Iterator[str]:
        """The lines that end in `block`."""
        if self._was_return:
            self._was_return = False
            if block.startswith(b"\n"):
                # a Windows line end across two blocks
                self._is_old_mac = False
                self.offset += 1
                block = block[1:]
        if self._is_old_mac is None and (b"\n" in block or b"\r" in block):
            self._is_old_mac = b"\n" not in block
        start = 0
        for end in (_ANY_END if self._is_old_mac else _LINE_FEED).finditer(block):
            self._was_return = end[0] == b"\r" and end.end() == len(block)
            yield self._line(block[start : end.start()], len(end[0]))
            start = end.end()
        self._keep(block[start:])

    def end(self) -> Iterator[str]:
        """The last line, if the text does not end with a line end."""
        if self._num_kept:
            yield self._line(b"", 0)

    def _keep(self, part: bytes) -> None:
        if part:
            self._kept.append(part)
            self._num_kept += len(part)
            self._check(self._num_kept - 1)  # a carriage return at its end does not count

    def _check(self, length: int) -> None:
        if length > self.max_line_bytes:
            raise InputError(
                f"{self.name}: line {self.number + 1} has more than {self.max_line_bytes:,} bytes; split the "
                "line, check that the file is text, or raise --max-line-bytes of relpos translate."
            )

    def _line(self, last: bytes, end: int) -> str:
        """The line that consists of the kept bytes and `last`; its line end has `end` bytes."""
        raw = b"".join([*self._kept, last])
        self._check(len(raw.removesuffix(b"\r")))
        self._kept, self._num_kept = [], 0
        self.number += 1
        start = self.offset
        self.offset += len(raw) + end
        if self.number == 1 and raw.startswith(_BYTE_ORDER_MARK):
            raw = raw[len(_BYTE_ORDER_MARK) :]
            start += len(_BYTE_ORDER_MARK)
        return _decode(raw.removesuffix(b"\r"), self.name, self.number, start)


class _Plain:
    """Unbuffered bytes of a stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._first = stream, b""
        # a stream without read1 is read in whole blocks
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)

    def begins_with(self, start: bytes) -> bool:
        """Whether the stream begins with `start`; reads no more than needed."""
        while len(self._first) < len(start) and start.startswith(self._first):
            more = self._read(_BLOCK)
            if not more:
                break
            self._first += more
        return self._first.startswith(start)

    def read(self) -> bytes:
        """Up to a block of bytes, as soon as any are available; none at the end."""
        first, self._first = self._first, b""
        return first or self._read(_BLOCK)

    def is_ready(self) -> bool:
        """Whether more can be read without waiting."""
        try:
            return bool(self._first or select.select([self._stream], [], [], 0)[0])
        except ValueError:
            # the stream has no file descriptor, so it is in memory
            return True
        except OSError:
            # Windows supports select on sockets only
            return False


class _Unpacked:
    """Decompressed bytes of a gzipped stream, without waiting for whole blocks as `gzip` does."""

    def __init__(self, packed: _Plain) -> None:
        self._packed = packed
        self._member = zlib.decompressobj(wbits=31)  # 31: gzip's header and checksum
        self._rest = b""  # compressed bytes not used yet
        self._has_more = False  # decompressed bytes that did not fit into a block

    def read(self) -> bytes:
        """Up to a block of bytes, as soon as any are available; none at the end."""
        while True:
            packed = self._rest or (b"" if self._has_more else self._packed.read())
            if self._member.eof:
                # another member may follow after zero bytes
                packed = packed.lstrip(b"\0")
                while not packed and (more := self._packed.read()):
                    packed = more.lstrip(b"\0")
                if not packed:
                    return b""
                self._member = zlib.decompressobj(wbits=31)
            elif not packed and not self._has_more:
                raise EOFError
            text = self._member.decompress(packed, _BLOCK)
            self._rest = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            self._has_more = len(text) == _BLOCK and not self._member.eof
            if text:
                return text

    def is_ready(self) -> bool:
        """Whether more can be read without waiting."""
        return bool(self._rest) or self._has_more or self._packed.is_ready()


@contextmanager
def _open(file: Path | BinaryIO) -> Iterator[_Plain | _Unpacked]:
    """Open a path or wrap a stream; a stream stays open."""
    with ExitStack() as stack:
        if isinstance(file, Path):
            check_is_file(file)
            file = cast(BinaryIO, stack.enter_context(file.open("rb")))
        plain = _Plain(file)
        yield _Unpacked(plain) if plain.begins_with(_GZIP) else plain


def _decode(line: bytes, name: str, number: int, start: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        looks, encoding = "", "LATIN1"
        if number == 1 and line[:2] in _UTF16_MARKS:
            looks, encoding = " and looks like UTF-16", "UTF-16"
        advice = f"convert it with, for example, `iconv -f {encoding} -t UTF-8`"
        if b"\0" in line and not looks:
            advice = "it is UTF-16 without a byte-order mark, or not text"
        raise InputError(
            f"{name} is not UTF-8{looks}: line {number} has byte 0x{line[error.start]:02x} "
            f"at byte offset {start + error.start}; {advice}."
        ) from error
