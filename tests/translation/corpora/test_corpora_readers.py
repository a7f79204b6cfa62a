"""Pairs from plain files: what is tolerated, and what a person is told about the rest."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from relpos.translation.corpora import (
    MAX_LINE_BYTES,
    Source,
    clean,
    corpus_cache,
    join_corpora,
    read_corpus,
    read_lines,
)
from relpos.translation.errors import InputError


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _write_jsonl(path: Path, *records: object) -> Path:
    return _write(path, "".join(json.dumps(record) + "\n" for record in records))


RECORD = b'{"source": "one", "target": "eins", "t": {"en": "two", "de": "zwei"}}'


@pytest.mark.parametrize(
    ("content", "keys", "pairs"),
    [
        (b"one\teins\ntwo\tzwei\n", {}, [("one", "eins"), ("two", "zwei")]),
        (b"7\teins\tone\n8\tzwei\ttwo\n", {"columns": [2, 1]}, [("one", "eins"), ("two", "zwei")]),
        (b"a\tb\nc\td\ne\tf\n", {"limit": 2}, [("a", "b"), ("c", "d")]),
        (gzip.compress(b"one\teins\n", mtime=0), {}, [("one", "eins")]),
        (b"\xef\xbb\xbfone\teins\r\n\r\ntwo\tzwei\r\n\n", {}, [("one", "eins"), ("two", "zwei")]),
        (RECORD, {"jsonl": True}, [("one", "eins")]),
        (RECORD, {"jsonl": True, "fields": ["t.en", "t.de"]}, [("two", "zwei")]),
        (b'{"t.en": "one", "t.de": "eins"}', {"jsonl": True, "fields": ["t.en", "t.de"]}, [("one", "eins")]),
    ],
)
def test_pairs_are_read_as_their_keys_say(tmp_path, read, content, keys, pairs):
    # gzip is recognised by its content
    path = _write(tmp_path / "a.gz", content)
    assert read(**{"jsonl" if keys.pop("jsonl", False) else "tsv": path}, **keys) == pairs


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x85", "\r"])
def test_only_a_line_feed_ends_a_line(tmp_path, read, sign):
    path = _write(tmp_path / "a.tsv", f"one{sign}two\teins\nthree\tdrei\n")
    assert read(tsv=path) == [("one two", "eins"), ("three", "drei")]
    files = _write(tmp_path / "en", f"one{sign}two\nthree\n"), _write(tmp_path / "de", "eins\ndrei\n")
    assert read(files=files) == [("one two", "eins"), ("three", "drei")]


def test_texts_are_normalised_from_every_kind_of_file(tmp_path, read):
    left, right, pair = " u\u0308ber\u200b  all ", "a\u030a\u00a0\ufeff\u00ad", [("\u00fcber all", "\u00e5")]
    assert read(tsv=_write(tmp_path / "a.tsv", f"{left}\t{right}\n")) == pair
    assert read(jsonl=_write_jsonl(tmp_path / "a.jsonl", {"source": left, "target": right})) == pair
    assert read(files=(_write(tmp_path / "en", left), _write(tmp_path / "de", right))) == pair


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_every_kind_of_file_has_as_many_lines_as_it_shows(tmp_path, read, end):
    pairs = [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    path = _write(tmp_path / "a.tsv", end.join(map("\t".join, pairs)))
    assert read(tsv=path) == pairs
    columns = [end.join(column) + end for column in zip(*pairs, strict=True)]
    assert read(files=(_write(tmp_path / "en", columns[0]), _write(tmp_path / "de", columns[1]))) == pairs
    records = [json.dumps({"source": left, "target": right}) for left, right in pairs]
    assert read(jsonl=_write(tmp_path / "a.jsonl", end.join(records))) == pairs


@pytest.mark.parametrize("side", ["source", "target"])
def test_half_of_a_surrogate_pair_in_json_is_told_with_file_and_line(tmp_path, failure, side):
    record = {"source": "a", "target": "b"} | {side: "ab\ud83d"}
    path = _write_jsonl(tmp_path / "a.jsonl", {"source": "a", "target": "b"}, record)
    assert failure(jsonl=path).startswith(
        f"{path} line 2: field {side!r} has half of a surrogate pair, U+D83D, as character 3;"
    )


def test_a_line_too_long_is_told_with_file_and_line(tmp_path, failure):
    path = _write(tmp_path / "a.tsv", b"one\teins\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\ty\n")
    assert failure(tsv=path).startswith(f"{path}: line 2 has more than 4,194,304 bytes; split the line")
    jsonl = _write(tmp_path / "a.jsonl", b"{" + b" " * MAX_LINE_BYTES + b"}")
    assert failure(jsonl=jsonl).startswith(f"{jsonl}: line 1 has more than 4,194,304 bytes;")
    files = _write(tmp_path / "en", b"x" * (MAX_LINE_BYTES + 1)), _write(tmp_path / "de", "y\n")
    assert failure(files=files).startswith(f"{files[0]}: line 1 has more than 4,194,304 bytes;")


def test_corpora_are_joined_in_order(tmp_path):
    paths = [_write(tmp_path / name, f"{name}\tx\n") for name in ("a", "b")]
    numbers = {"numbers": {"lines": 2, "largest": 9}}
    sources = [Source(tsv=paths[1]), Source(**numbers), Source(tsv=paths[0])]
    joined = join_corpora([read_corpus(source, "en", "de", tmp_path / "cache") for source in sources])
    assert joined.column_names == ["source", "target"]
    assert [joined[0]["source"], joined[3]["source"], len(joined)] == ["b", "a", 4]
    with pytest.raises(InputError, match="give at least one of tsv, files"):
        join_corpora([])


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path, monkeypatch):
    path, cache = _write(tmp_path / "a.tsv", "one\teins\n"), tmp_path / "cache"
    first = read_corpus(Source(tsv=path), "en", "de", cache)
    with monkeypatch.context() as patched:
        patched.setattr(corpus_cache, "read_tsv", None)
        again = read_corpus(Source(tsv=path), "en", "de", cache)
    assert again.cache_files == first.cache_files
    assert Path(first.cache_files[0]["filename"]).is_relative_to(cache)
    _write(path, "two\tzwei\n")
    os.utime(path, ns=(1, 1))
    assert read_corpus(Source(tsv=path), "en", "de", cache)[0]["source"] == "two"


def test_what_another_process_left_half_written_is_not_taken_for_whole(tmp_path, read):
    path = _write(tmp_path / "a.tsv", "".join(f"line {i}\tZeile {i}\n" for i in range(5_000)))
    script = """
import os, pathlib, signal, sys
from relpos.translation.corpora import Source, corpus_cache, readers
def killed(*args):
    for number, pair in enumerate(readers.read_tsv(*args)):
        if number == 3_000:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair
corpus_cache.read_tsv = killed
corpus_cache.read_corpus(Source(tsv=sys.argv[1]), "en", "de", pathlib.Path(sys.argv[2]))
"""
    arguments = [sys.executable, "-c", script, str(path), str(tmp_path / "cache")]
    killed = subprocess.run(arguments, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert len(read(tsv=path)) == 5_000


def test_a_full_disk_is_told_as_such_and_not_as_a_fault_of_the_corpus(tmp_path, full_disk):
    path = _write(tmp_path / "a.tsv", "".join(f"line {i}\tZeile {i}\n" for i in range(5_000)))
    whole = read_corpus(Source(tsv=path), "en", "de", tmp_path / "whole")
    with full_disk():
        with pytest.raises(OSError, match="File too large"):
            read_corpus(Source(tsv=path), "en", "de", tmp_path / "cache")
        with pytest.raises(OSError, match="File too large"):
            clean(whole)
    assert len(read_corpus(Source(tsv=path), "en", "de", tmp_path / "cache")) == 5_000


TSV, JSONL, FIELDS = {"tsv": True}, {"jsonl": True}, {"jsonl": True, "fields": ["t.em", "t.de"]}
NOT_UTF_8 = "line 2 has byte 0xff at byte offset 11; it is UTF-16 without a byte-order mark, or not text."


@pytest.mark.parametrize(
    ("content", "keys", "told"),
    [
        (None, TSV, " does not exist (seen from "),
        (
            "one\teins\n".encode("utf-16"),
            TSV,
            "is not UTF-8 and looks like UTF-16: line 1 has byte 0xff at byte",
        ),
        (b"one\teins\n\x00\x01\xff\n", TSV, NOT_UTF_8),
        (b"one\teins\n\ntwo zwei\n", TSV, "line 3 has no tab; each line must be `source TAB target`."),
        (
            b"1\tone\teins\n2\ttwo\n",
            {"tsv": True, "columns": [1, 2]},
            "line 2 has 2 columns and columns [1, 2]",
        ),
        (RECORD + b'\n{"source": }\n', JSONL, "line 2 is not JSON: Expecting value at column 12"),
        *(
            (b"[1]", JSONL, "line 1 must be a JSON object; got a list."),
            (b'"x"', JSONL, "object; got a text."),
        ),
        *(
            (b"3", JSONL, "line 1 must be a JSON object; got a number."),
            (b"null", JSONL, "object; got null."),
        ),
        (b'{"source": "a", "target": null}', JSONL, "line 1: field 'target' must be text; got null."),
        (RECORD, FIELDS, "line 1 has no field 't.em'; the nearest is 't.en'. "),
        (b'{"t": {"en": "a"}}', JSONL, "line 1 has no field 'source'; it has t, t.en."),
        (
            gzip.compress(os.urandom(3000).hex().encode() + b"\ta\n")[:1500],
            TSV,
            "is damaged or truncated gzip",
        ),
        (b"\x1f\x8b" + bytes(40), TSV, "is damaged or truncated gzip"),
        *(
            (b"", TSV, "has no pair;"),
            (b"\n\n", TSV, "has no pair; check that it is the right one."),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_told_with_file_and_line(tmp_path, failure, content, keys, told):
    path = tmp_path / "a"
    if content is not None:
        _write(path, content)
    message = failure(**{name: path if value is True else value for name, value in keys.items()})
    assert str(path) in message
    assert told in message


def test_a_folder_is_no_file(tmp_path, failure):
    assert f"{tmp_path} is a folder, and a file was expected" in failure(jsonl=tmp_path)


@pytest.mark.parametrize(("source", "target"), [(3, 5), (5, 3), (0, 1)])
def test_unequal_files_are_told_with_both_counts(tmp_path, failure, source, target):
    files = _write(tmp_path / "en", "a\n" * source), _write(tmp_path / "de", "b\n" * target)
    assert failure(files=files).startswith(f"{files[0]} has {source} lines and {files[1]} has {target};")


def _zipped(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name in names:
            file.writestr(name, "a\tb\n")
    return packed.getvalue()


def _tarred() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        file.addfile(tarfile.TarInfo("pairs.tsv"))
    return packed.getvalue()


FOREIGN = {
    "a zip archive; unpack it with `unzip`": _zipped("pairs.tsv"),
    "an Excel workbook; save it as tab-separated text": _zipped("[Content_Types].xml", "xl/workbook.xml"),
    "a Word document; save it as plain text": _zipped("[Content_Types].xml", "word/document.xml"),
    "an xz archive; unpack it with `xz -d`": lzma.compress(b"a\tb\n"),
    "a bzip2 archive; unpack it with `bzip2 -d`": bz2.compress(b"a\tb\n"),
    "a zstd archive; unpack it with `zstd -d`": b"(\xb5/\xfd\x04\x00\x01",
    "a tar archive; unpack it with `tar xf`": _tarred(),
    "a parquet file; name its folder by `dataset:`": b"PAR1\x15\x04\x15",
    "a PDF document; save its text as plain text": b"%PDF-1.7\n%\xb5\xb5",
    "an old Office document; save it": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99),
    "an SQLite database; write its table": b"SQLite format 3\x00" + bytes(99),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_kind_is_named_and_nobody_is_sent_to_iconv(tmp_path, failure, kind):
    path = _write(tmp_path / "a.tsv", FOREIGN[kind])
    message = failure(tsv=path)
    assert message.startswith(f"{path} is {kind}")
    assert "iconv" not in message
    assert f"{path} is {kind}" in failure(jsonl=path)
    packed = _write(tmp_path / "a.gz", gzip.compress(FOREIGN[kind]))
    assert failure(tsv=packed).startswith(f"{packed} (unpacked) is {kind}")
    with pytest.raises(InputError, match=re.escape(f"standard input is {kind}")):
        list(read_lines(io.BufferedReader(io.BytesIO(FOREIGN[kind]))))


@pytest.mark.parametrize(
    "text", ["PK is a town", "BZh9", "%PDF", "Rar!", "7z x", "PAR1 is read", "(\u00b5/\u00fd", "{\\rt"]
)
def test_text_that_begins_like_another_kind_is_text(tmp_path, read, text):
    assert read(tsv=_write(tmp_path / "a.tsv", f"{text}\tx\n")) == [(text, "x")]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        ('{"source": ' + "9" * 5_000 + "}", "has a number with too many digits"),
        (
            '{"a": ' * 600 + "1" + "}" * 600,
            "has no field 'source'; it has a, a.a, a.a.a, a.a.a.a, a.a.a.a.a.",
        ),
    ],
)
def test_json_that_costs_too_much_is_told_with_its_line(tmp_path, failure, line, told):
    path = _write(tmp_path / "a.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    message = failure(jsonl=path)
    assert message.startswith(f"{path} line 2 {told}")
    assert len(message) < 300


def test_a_stream_is_read_as_a_file_and_stays_open():
    for content in (b"one\r\ntwo", gzip.compress(b"one\ntwo\n", mtime=0)):
        stream = io.BufferedReader(io.BytesIO(content))
        assert list(read_lines(stream)) == ["one", "two"]
        assert not stream.closed
    with pytest.raises(InputError, match="standard input is not UTF-8: line 2 has byte 0xff at byte"):
        list(read_lines(io.BufferedReader(io.BytesIO(b"one\n\xff"))))
    assert list(read_lines(io.BufferedReader(io.BytesIO(b"")))) == []


def test_a_cache_that_is_a_file_is_told(tmp_path):
    path = _write(tmp_path / "a.tsv", "a\tb\n")
    with pytest.raises(InputError, match=r"the cache folder .*a.tsv cannot be created: File exists"):
        read_corpus(Source(tsv=path), "en", "de", path)


def test_a_file_without_rights_is_told(tmp_path, failure, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    path = _write(tmp_path / "a.tsv", "a\tb\n")
    monkeypatch.setattr(Path, "open", refused)
    assert f"{path} cannot be read: Permission denied" in failure(tsv=path)
