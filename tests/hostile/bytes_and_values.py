"""Bytes and values that programs trip over, and ways to damage a file or a nested value."""

import copy
import json
from random import Random
from typing import Any

ODD_CHARACTERS = (
    "\x00\x01\x07\x08\x0b\x0c\x1b\x1c\x1d\x1e\x7f\x85\xa0\xad\u0300\u200b\u200d\u200e\u200f\u2028\u2029\u202e"
    "\u2066\u2069\ufeff\ufffd\uffff\ue000\U0001f468\U000e0001\U0010ffff\u0b95\u3000\u1680"
)
ODD_STRINGS = (
    *("", " ", "\n", "-", "--", "~", "null", "None", "no", "nan", "-inf", "1e400", "1e-40", "0x10", "-1"),
    *("0", "1.5", "9" * 5000, "x" * 5000, "%s%n", "{}", "[1, 2", "{a: b", "&a [*a]"),
    *("!!python/object/apply:os.system [id]", "!!binary aGk=", "../thesis.txt", "thesis.txt", "notes"),
    *("missing/file", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/dev/null/x", "a/" * 3000),
    *("\u202etxt.exe", "\udcff\udc80", "<s>", "\U0001f468\u200d\U0001f469", "2001-99-99", "`id`; $(id)"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 10**30, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "0", "no", "a" * 1000, "\ud800", "\u202e"),
    *([], [[]], [None], [1, 2], list(range(300)), {}, {"": ""}, {"a": {"b": [{}]}}),
)


def damaged(random: Random, data: bytes) -> bytes:
    """The same bytes, cut, changed, doubled or replaced."""
    if not data:
        return random.randbytes(20)
    at, more = random.randrange(len(data)), random.randrange(1, 60)
    kind = random.randrange(10)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[at:]
    if kind == 2:
        return data[:at] + random.randbytes(more) + data[at + more :]
    if kind == 3:
        return data[:at] + data[at + more :]
    if kind == 4:
        return data[:at] + bytes(more) + data[at:]
    if kind == 5:
        return data + data
    if kind == 6:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 7:
        return random.choice((b"", b"\n", b"\x00", b"{}", b"[]", b"null", b'""', b"1e999", b"\xff\xfe"))
    if kind == 8:
        return random.choice((b"[", b'{"a":', b"- ", b"{")) * random.choice((2000, 100_000))
    return data.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))


def changed(random: Random, value: Any, odd: tuple[Any, ...] = ODD_VALUES) -> Any:
    """A nested value with one to three places changed, removed, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return random.choice(odd)
        holder, key = random.choice(places)
        kind = random.randrange(8)
        if kind < 4:
            holder[key] = random.choice(odd)
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[f"{key}{random.choice('sx_ .')}"] = holder.pop(key)
        elif kind == 6:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(random.choice(places)[0])
    return value


def _places(value: Any) -> Any:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def damaged_json(random: Random, data: bytes) -> bytes:
    """A JSON file with values changed, or its bytes damaged, or what Python alone takes for JSON."""
    kind = random.randrange(10)
    if kind < 3:
        return damaged(random, data)
    if kind == 3:
        return data.replace(b"{", b'{"format": ' + b"9" * 5000 + b", ", 1)
    if kind == 4:
        return data.replace(b"{", b'{"zzz": ' + b"[" * 50_000 + b"]" * 50_000 + b", ", 1)
    try:
        return json.dumps(changed(random, json.loads(data))).encode()
    except RecursionError:
        # it was damaged before, by brackets
        return damaged(random, data)
