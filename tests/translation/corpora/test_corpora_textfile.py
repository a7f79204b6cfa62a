"""Lines of files, pipes and gzip: their ends, their limit, and that nobody waits for a line that is there."""

import gzip
import io
import os
import queue
import random
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relpos.translation.corpora import read_arrived, read_lines, text_lines
from relpos.translation.errors import InputError


class Dripping(io.BytesIO):
    """A stream that hands over `size` bytes at a time, and counts them."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self.size = size

    def read1(self, size: int | None = -1) -> bytes:
        return super().read(self.size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
def test_where_blocks_end_does_not_matter(size) -> None:
    draw = random.Random(size)
    for _ in range(50):
        lines = ["".join(draw.choices("ab\u00e9\u2028 ", k=draw.randint(0, 5))) for _ in range(6)]
        for end in ("\n", "\r\n", "\r"):
            content = "".join(line + end for line in lines).encode()
            for text in (content, content + b"last"):
                expected = lines + ["last"] * text.endswith(b"last")
                assert list(read_lines(Dripping(text, size))) == expected
                assert list(read_lines(Dripping(gzip.compress(text), size))) == expected


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\rb\r\rc", ["a", "b", "", "c"]),
        (b"\r", [""]),
        (b"\xef\xbb\xbfa\rb\r", ["a", "b"]),
        (b"a\nb\rc\n", ["a", "b\rc"]),
        (b"a\rb\nc\n", ["a\rb", "c"]),
        (b"a\r\r\nb", ["a\r", "b"]),
        (b"\n\r\n", ["", ""]),
        (b"", []),
    ],
)
def test_carriage_returns_end_lines_only_where_no_line_feed_does(text, lines, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(text)
    assert list(read_lines(path)) == lines
    assert list(read_lines(io.BytesIO(text))) == lines


def test_the_place_of_a_wrong_byte_counts_every_kind_of_end() -> None:
    for end in (b"\n", b"\r", b"\r\n"):
        text = b"one" + end + b"two" + end + b"\xff"
        with pytest.raises(InputError, match=f"line 3 has byte 0xff at byte offset {len(text) - 1};"):
            list(read_lines(Dripping(text, 1)))


def test_a_line_of_the_limit_is_read_and_one_more_byte_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for end in (b"", b"\n", b"\r\n", b"\r"):
        path.write_bytes(b"x" * 100 + end)
        assert list(read_lines(path, 100)) == ["x" * 100]
        path.write_bytes(b"y" * 101 + end)
        with pytest.raises(InputError, match=r"text: line 1 has more than 100 bytes; split the line"):
            list(read_lines(path, 100))
    with pytest.raises(InputError, match="line 1 has more than 100 bytes"):
        list(read_lines(Dripping(b"y" * 101 + b"\r\n", 7), 100))


def test_endless_lines_end_in_one_sentence_with_bounded_memory(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(50):
            file.write(bytes(1 << 20))
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(50 << 20)
    tracemalloc.start()
    try:
        for path in (long, bomb, Path("/dev/zero")):
            with pytest.raises(InputError, match="line 1 has more than 1,048,576 bytes"):
                list(read_lines(path, 1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_gzip_of_several_members_with_zeros_between_them_is_read_whole(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(50_000)).encode()
    packed = gzip.compress(text[:1000]) + bytes(70_000) + gzip.compress(text[1000:]) + bytes(512)
    path = tmp_path / "text.gz"
    path.write_bytes(packed)
    assert "\n".join(read_lines(path)) + "\n" == text.decode()
    # bytes that hold much more than a block
    path.write_bytes(gzip.compress(b"a\n" * 500_000))
    assert sum(line == "a" for line in read_lines(path)) == 500_000


def test_every_cut_of_a_gzip_is_told(tmp_path: Path) -> None:
    packed = gzip.compress(b"one\ntwo\n")
    for size in range(2, len(packed)):
        with pytest.raises(InputError, match="is damaged or truncated gzip"):
            list(read_lines(io.BytesIO(packed[:size])))
    with pytest.raises(InputError, match="is damaged or truncated gzip"):
        list(read_lines(io.BytesIO(packed + b"more")))


@pytest.fixture
def in_time() -> Callable[[Callable[[], Any]], Any]:
    """The result of a call that may hang, in which case the test fails after a minute."""

    def call(function: Callable[[], Any]) -> Any:
        results: queue.Queue = queue.Queue()
        threading.Thread(target=lambda: results.put(function()), daemon=True).start()
        return results.get(timeout=60)

    return call


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_line_on_a_pipe_is_there_before_the_next_is_written(in_time, end, is_packed) -> None:
    out, into = os.pipe()
    packer = zlib.compressobj(wbits=31)

    def write(text: bytes) -> None:
        os.write(into, packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH) if is_packed else text)

    with os.fdopen(out, "rb") as stream:
        batches = read_arrived(stream, at_once=100)
        for text, lines in (
            (end, [""]),
            (b"one" + end, ["one"]),
            (b"two" + end + b"three" + end + b"fo", ["two", "three"]),
            (b"ur" + end, ["four"]),
        ):
            write(text)
            assert in_time(lambda: next(batches)) == lines
        write(b"five")
        os.write(into, packer.flush() if is_packed else b"")
        os.close(into)
        assert list(batches) == [["five"]]


def test_a_file_is_read_in_large_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "_BLOCK", 64)
    path = tmp_path / "text"
    path.write_bytes(b"line\n" * 1000)
    sizes = [len(lines) for lines in read_arrived(path, at_once=300)]
    assert sum(sizes) == 1000
    assert all(300 <= size < 300 + 64 for size in sizes[:-1])
    with path.open("rb") as stream:
        assert [len(lines) for lines in read_arrived(stream, at_once=2000)] == [1000]
