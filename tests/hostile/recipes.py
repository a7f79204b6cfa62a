"""Recipes: a good one with keys, kinds and values changed, and YAML that costs or hides something."""

import random as randomness
from pathlib import Path
from random import Random
from typing import Any

import yaml

from hostile.bytes_and_values import ODD_STRINGS, ODD_VALUES, changed, damaged
from hostile.case import Case, Material

# values with which training takes no longer than it would
_MILD = tuple(value for value in ODD_VALUES if not isinstance(value, int) or abs(value) < 10)
_SHORT = [
    *("--training.updates=2", "--training.minutes=0.1", "--training.warmup=2", "--model.d_model=16"),
    *("--model.d_ff=32", "--model.encoder_layers=1", "--model.decoder_layers=1"),
    *("--training.tokens_per_batch=512", "--training.accumulation=1", "--training.max_length=24"),
    "--tokenizer.vocabulary=320",
]


def make(random: Random, home: Path, material: Material) -> Case:
    """`recipe FILE` or `train FILE`."""
    is_trained = random.random() < 0.25
    values = yaml.safe_load(material.recipe.read_text())
    data = _written(random, values, _MILD if is_trained else ODD_VALUES, is_text_kept=is_trained)
    (home / "mine.yaml").write_bytes(data)
    if not is_trained:
        return Case("recipe", ["recipe", "mine.yaml"])
    return Case("recipe", ["train", "mine.yaml", "--out", "run", *_SHORT], outputs=("run",))


def _written(random: Random, values: Any, odd: tuple[Any, ...], *, is_text_kept: bool) -> bytes:
    plain = yaml.safe_dump(values).encode()
    kind = random.randrange(10)
    if kind < 5:
        numbers = values["data"]["train"][0]
        if random.random() < 0.3:
            values["data"]["train"] = [numbers, _source(random)]
        try:
            return yaml.safe_dump(changed(random, values, odd), allow_unicode=True).encode("utf-8", "replace")
        except yaml.YAMLError:
            return b"a: *b"
    if kind == 5:
        return damaged(random, plain)
    if kind == 6:
        # a key twice, a tab, a tag, a date, an anchor, in the place of a line or after it
        lines = plain.decode().splitlines()
        at = random.randrange(len(lines))
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip(" -"))].replace("-", " ")
        lines.insert(at + random.randrange(2), indent + random.choice(_ODD_LINES))
        return "\n".join(lines).encode()
    if kind == 7:
        return random.choice(_BOMBS)
    if kind == 8:
        return plain.replace(b": ", b": " + random.choice(ODD_STRINGS)[:2000].encode("utf-8", "replace"), 1)
    return plain + random.choice(
        (b"\x00", b"\n---\na: 1\n", b"\n...\n%YAML 9.9\n---\n", b"\xff", b"\n\t\ta: 1")
    )


def _source(random: Random) -> dict[str, Any]:
    """A corpus that is not there, or is no corpus."""
    places = (
        *("/dev/zero", "/dev/null", "notes", "thesis.txt", "missing", "a" * 300, "/proc/self/mem", "\ud800"),
    )
    place = random.choice(places)
    return random.choice(
        (
            {"tsv": place},
            {"tsv": "thesis.txt", "columns": random.choice(([5, 10**9], [0, 0], [-1, 2]))},
            {"jsonl": place, "fields": ["a.b.c", ""]},
            {"files": [place, random.choice(places)]},
            {"catalogs": [random.choice(("missing", "", "../x", "a b", "pip"))]},
            {"dataset": random.choice(("./notes", "nobody/nothing", "/", "\x00", "a" * 300))},
        )
    )


_ODD_LINES = (
    *("seed: 1", "\tseed: 1", "seed: 2001-99-99", "seed: 2001-01-01T99:99:99Z", "seed: !!binary '%%'"),
    *("seed: !!python/name:os.system", "seed: !!set {a, b}", "seed: !!int x", "seed: !!float ''", "seed: 0x"),
    *("seed: 1_0:99:99", "seed: &a [*a]", "seed: *missing", "? [a, b]", "? {a: b}: c", "<<: {seed: 1}"),
    *("<<: 3", "=: 1", "~: 1", "no: 1", "1: 1", "seed: >9\n x", 'seed: "\\ud800"', "seed: '", "@"),
    "%TAG ! !",
)
_BOMBS = (
    b"[" * 20_000,
    b"{" * 20_000,
    b"a: " * 5_000,
    b"- " * 20_000,
    b"? " * 5_000,
    b"&a [" * 3_000,
    b"a: &a [x,x,x,x,x,x,x,x]\n"
    + b"\n".join(
        b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]" % tuple([98 + i] * 2 + [97 + i] * 8) for i in range(12)
    ),
    b"seed: " + b"9" * 5_000,
    b"seed: 0b" + b"1" * 100_000,
    b"seed: 1" + b":59" * 20_000,
    b"x" * 3_000_000,
    b"\n" * 3_000_000,
    "data: \ufeff\u2028\u202e".encode(),
    randomness.Random(1).randbytes(5_000),
)
