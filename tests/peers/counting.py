"""The rule by which tests are counted, for both sides alike, and the table of the counts.

    passed    the test passed, and held at least one assertion or called a module's forward, generate,
              save_pretrained, from_pretrained or backward
    empty     the test passed without any of these: it returned early, or looped over nothing
    skipped   the test skipped itself, or was skipped
    failed    any part of it failed
"""

import re
from collections import Counter
from typing import Any

from reasons import REASONS

KINDS = ("passed", "empty", "skipped", "failed")
Records = dict[str, dict[str, Any]]


def kind_of(record: dict[str, Any]) -> str:
    """What a test counts as."""
    if record["outcome"] == "passed" and not record["assertions"] and not record.get("calls"):
        return "empty"
    return record["outcome"]


def count(records: Records) -> dict[str, int]:
    """The number of tests of each kind."""
    counts = Counter(kind_of(record) for record in records.values())
    return {kind: counts[kind] for kind in KINDS}


def table(counts: dict[str, dict[str, int]]) -> str:
    """Sides as rows, kinds as columns, in Markdown."""
    rows = [("side", *KINDS), ("---", *["---:"] * len(KINDS))]
    rows += [(side, *(str(number[kind]) for kind in KINDS)) for side, number in counts.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def differences(ours: Records, peers: Records) -> list[tuple[str, str, str, str]]:
    """Each failure of ours, and each test that tests nothing here alone: name, kinds, what it said, our reason."""
    lines = []
    for name, record in sorted(ours.items()):
        kind, kind_there = kind_of(record), kind_of(peers[name]) if name in peers else "missing"
        if kind == "failed" or (kind in ("skipped", "empty") and kind_there in ("passed", "failed")):
            lines.append((name, f"{kind}, there {kind_there}", record.get("reason", ""), reason_for(name)))
    return lines


def reason_for(name: str) -> str:
    """Our written reason, or nothing."""
    test = name.split("::")[-1]
    return next((reason for key, reason in REASONS.items() if re.fullmatch(key, test)), "")


def stale(ours: list[Records], listed: list[tuple[str, str, str, str]]) -> list[str]:
    """Reasons whose tests ran on our sides, and needed none."""
    ran = {name.split("::")[-1] for records in ours for name in records}
    needed = {name.split("::")[-1] for name, *_ in listed}
    return [
        key
        for key in REASONS
        if any(re.fullmatch(key, test) for test in ran)
        and not any(re.fullmatch(key, test) for test in needed)
    ]
