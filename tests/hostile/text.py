"""Text to translate that no translator was made for."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from hostile.bytes_and_values import ODD_CHARACTERS, ODD_STRINGS, damaged
from hostile.case import Case, Material

_WORDS = ["one", "two", "thirty-five", "seven", "hundred"]


def words(random: Random, count: int = 3) -> str:
    return " ".join(random.choices(_WORDS, k=count))


def _lines(random: Random) -> str:
    return "".join(f"{words(random)}\n" for _ in range(random.randint(1, 6)))


def _odd(random: Random) -> bytes:
    signs = random.choices(ODD_CHARACTERS + " \n\tab", k=random.choice((1, 20, 300)))
    return "".join(signs).encode("utf-8", "surrogatepass")


def _gzip(random: Random) -> bytes:
    packed = gzip.compress(_lines(random).encode() * 50, mtime=0)
    return random.choice((packed, packed[:-9], packed[: len(packed) // 2], packed[:3], packed + b"x"))


def _zip(random: Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a.txt"), _lines(random))
    return file.getvalue()


def _long(random: Random) -> bytes:
    """A line, or a word, of up to some MB."""
    size = random.choice((5_000, 100_000, 1_000_000, 3_000_000))
    unit = random.choice(
        (b"x", b"one ", "\u0301".encode(), "\U0001f468\u200d".encode(), b". ", b"\x00", b"<s>")
    )
    return unit * (size // len(unit)) + b"\n"


KINDS: tuple[Callable[[Random], bytes], ...] = (
    lambda r: b"",
    lambda r: r.randbytes(r.choice((1, 10, 1000))),
    lambda r: b"caf\xe9 one\n\xff\xfe two\n",
    lambda r: b"\xed\xa0\x80 one\n",
    lambda r: b"\xc0\xaf\xf8\x88\x80\x80\x80\n",
    lambda r: _lines(r).encode(r.choice(("utf-16", "utf-16-be", "utf-32", "utf-8-sig", "utf-7", "cp037"))),
    lambda r: r.choice((b"\x00", b"\x00\n", b"a\x00b\n", b"\x00" * 10_000)),
    lambda r: _lines(r).replace("\n", "\r").encode(),
    lambda r: (
        _lines(r).replace("\n", r.choice(("\r\r\n", "\n\r", "\x0b", "\x0c", "\x85", "\u2028"))).encode()
    ),
    lambda r: b"\n" * r.choice((1, 3000)),
    lambda r: ("e" + "\u0301" * 10_000 + "\n").encode(),
    lambda r: ("\u202e" + words(r) + "\u2066" * 50 + "\n").encode(),
    lambda r: (r.choice(ODD_STRINGS)[:2000] + "\n").encode("utf-8", "surrogateescape"),
    lambda r: (words(r) + "".join(r.choices(("<s>", "</s>", "<pad>", "<unk>"), k=9)) + "\n").encode(),
    lambda r: json.dumps({"source": "\ud800 one"}).encode(),
    lambda r: b"%PDF-1.4\n" + r.randbytes(200),
    lambda r: b"\x7fELF\x02\x01\x01" + bytes(9) + r.randbytes(200),
    lambda r: damaged(r, _lines(r).encode()),
    *(_odd, _odd, _gzip, _zip, _long, _long),
)


def make(random: Random, home: Path, material: Material) -> Case:
    """`translate` of a file or of standard input."""
    data = random.choice(KINDS)(random)
    name = "in" + random.choice(("", ".txt", ".gz", ".jsonl", ".zip", " \u202e\n"))
    if random.random() < 0.05:
        data = gzip.compress(bytes(1 << 27), compresslevel=1, mtime=0)
        name = "in.gz"
    arguments = ["translate", str(material.model)]
    if is_file := random.random() < 0.6:
        (home / name).write_bytes(data)
        arguments.append(random.choice((name, str(home / name))))
        if random.random() < 0.1:
            arguments[-1] = random.choice(("/dev/zero", "/dev/null", "notes", "/proc/self/mem", "missing"))
    outputs: tuple[str, ...] = ()
    arguments += ["--beams", str(random.choice((1, 1, 1, 2, 3)))] if random.random() < 0.8 else []
    for options, likely in (
        (["--json"], 0.3),
        # a long line in pieces is long work, which whoever asks for it gets
        (["--split-long"], 0.3 if len(data) < 30_000 else 0),
        (["--max-line-bytes", str(random.choice((1, 100, 2 * 10**6)))], 0.2),
        (["--batch-tokens", str(random.choice((1, 50, 10**9)))], 0.2),
        (["--prefix", random.choice(("one", "", "\u202e\u0301", "<s>", "x" * 3000, "\udcff"))], 0.2),
    ):
        arguments += options if random.random() < likely else []
    if random.random() < 0.3:
        arguments += ["-o", "out.txt"]
        outputs = ("out.txt",)
    return Case("text", arguments, b"" if is_file else data, outputs)
