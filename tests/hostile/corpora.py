"""Corpora: tsv, jsonl, aligned files and message catalogs with damage in them."""

import gzip
import json
from pathlib import Path
from random import Random

import yaml

from hostile import text
from hostile.bytes_and_values import ODD_VALUES, changed, damaged
from hostile.case import Case, Material
from hostile.recipes import _SHORT

_PO = """msgid ""
msgstr "Content-Type: text/plain; charset={}\\nPlural-Forms: nplurals=2; plural=n != 1;\\n"

#, fuzzy
msgid "one"
msgstr "eins"

msgctxt "menu"
msgid "{{0}} file"
msgid_plural "{{0}} files"
msgstr[0] "{{0}} Datei"
msgstr[1] "{{0}} Dateien"
"""


def make(random: Random, home: Path, material: Material) -> Case:
    """`evaluate --data` or `train` on text of the user."""
    kind = random.choice(("tsv", "tsv", "jsonl", "jsonl", "files", "catalogs"))
    packed = kind != "catalogs" and random.random() < 0.3
    names = {"tsv": ["a.tsv"], "jsonl": ["a.jsonl"], "files": ["a.en", "a.de"], "catalogs": [_CATALOG]}[kind]
    names = [name + ".gz" if packed else name for name in names]
    is_scored = kind != "catalogs" and random.random() < 0.6
    for name in names:
        data = _PAIRS[kind](random, 4 if is_scored else 60)
        data = random.choice(text.KINDS)(random) if random.random() < 0.2 else data
        data = gzip.compress(data, mtime=0) if packed else data
        data = damaged(random, data) if random.random() < 0.3 else data
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    if is_scored:
        data_options = [part for name in names for part in ("--data", name)]
        arguments = ["evaluate", str(material.model), *data_options, "--beams=1"]
        arguments += ["--hypotheses", "out.txt"] if random.random() < 0.3 else []
        return Case("corpus", arguments, outputs=("out.txt",))
    values = yaml.safe_load(material.recipe.read_text())
    value = ["hostile"] if kind == "catalogs" else names if kind == "files" else names[0]
    source = {kind: value}
    if kind == "catalogs":
        info = home / "site" / "hostile-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{Path(_CATALOG).relative_to('site')},,\n")
    values["data"]["train"] = [source] if random.random() < 0.5 else [*values["data"]["train"], source]
    (home / "mine.yaml").write_text(yaml.safe_dump(values))
    site = "site" if kind == "catalogs" else None
    return Case("corpus", ["train", "mine.yaml", "--out", "run", *_SHORT], outputs=("run",), site=site)


_CATALOG = "site/hostile/locale/de/LC_MESSAGES/hostile.po"


def _tsv(random: Random, count: int) -> bytes:
    lines = []
    for _ in range(count):
        line = f"{text.words(random)}\t{text.words(random)}"
        kind = random.randrange(30)
        if kind == 0:
            line = line.replace("\t", random.choice(("", " ", "\t\t", "\x00", "\r")))
        elif kind == 1:
            line = random.choice(("", "\t", "\ufeff\t\ufeff", "a\t" + "\u0301" * 3000, "\u200b\t\u00ad"))
        elif kind == 2:
            line = f'"{line}'
        lines.append(line)
    return "\n".join(lines).encode()


def _jsonl(random: Random, count: int) -> bytes:
    lines = []
    for _ in range(count):
        record: object = {"source": text.words(random), "target": text.words(random)}
        if random.random() < 0.05:
            record = changed(random, record, ODD_VALUES)
        lines.append(json.dumps(record))
        if random.random() < 0.02:
            digits, twice = '{"source": ' + "9" * 5000 + "}", '{"source": "a", "source": 1e999}'
            lines.append(random.choice(("[" * 50_000, digits, twice, "NaN", "")))
    return "\n".join(lines).encode()


def _po(random: Random, count: int) -> bytes:
    charset = random.choice(
        ["utf-8", "utf-8", "utf-16", "latin-1", "nothing", "\x00", "zlib", "rot13", "idna"]
    )
    data = _PO.format(charset) + "".join(
        f'\nmsgid "{text.words(random)} {n}"\nmsgstr "{text.words(random)} {n}"\n' for n in range(count)
    )
    return damaged(random, data.encode()) if random.random() < 0.6 else data.encode()


_PAIRS = {
    "tsv": _tsv,
    "jsonl": _jsonl,
    "files": lambda random, count: text.words(random).encode() + b"\n" * count,
    "catalogs": _po,
}
