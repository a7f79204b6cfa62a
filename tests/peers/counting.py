"""The rule by which tests are counted, for both sides alike, and the table of the counts.

passed    the test passed, and held at least one assertion or called a module's forward, generate,
          save_pretrained, from_pretrained or backward
empty     the test passed without any of these: it returned early, or looped over nothing
skipped   the test skipped itself, or was skipped
failed    any part of it failed
"""

import re
from collections import Counter
from typing import Any, NamedTuple

from reasons import REASONS

# the tests of generation are a part of the suite that runs those of models
PARTS = {"tests.generation.test_utils": "transformers: generation"}
KINDS = ("passed", "empty", "skipped", "failed")
Records = dict[str, dict[str, Any]]


def kind_of(record: dict[str, Any]) -> str:
    """What a test counts as."""
    if record["outcome"] == "passed" and not record["assertions"] and not record["calls"]:
        return "empty"
    return record["outcome"]


def parts(suite: str, records: Records) -> dict[str, Records]:
    """The records by the part of the suite they are from."""
    found: dict[str, Records] = {}
    for name, record in records.items():
        found.setdefault(PARTS.get(record["module"], suite), {})[name] = record
    return found


def count(records: Records) -> dict[str, int]:
    """The number of tests of each kind."""
    counts = Counter(kind_of(record) for record in records.values())
    return {kind: counts[kind] for kind in KINDS}


def table(counts: dict[str, dict[str, int]]) -> str:
    """Sides as rows, kinds as columns, in Markdown."""
    rows = [("side", *KINDS), ("---", *["---:"] * len(KINDS))]
    rows += [(side, *(str(number[kind]) for kind in KINDS)) for side, number in counts.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class Difference(NamedTuple):
    """A failure of ours, or a test that tests nothing on our side alone."""

    test: str
    # what it counts as, here and there
    kinds: str
    # the error, or the suite's reason to skip
    said: str
    # our own; empty if there is none
    reason: str


def differences(ours: Records, peers: Records) -> list[Difference]:
    """Each failure of ours, and each test that is empty or skipped here alone."""
    found = []
    for name, record in sorted(ours.items()):
        kind, kind_there = kind_of(record), kind_of(peers[name]) if name in peers else "missing"
        if kind == "failed" or (kind in ("skipped", "empty") and kind_there in ("passed", "failed")):
            test = name.split("::")[-1]
            kinds, said = f"{kind}, there {kind_there}", record.get("reason", "")
            found.append(Difference(test, kinds, said, reason_for(test)))
    return found


def reason_for(test: str) -> str:
    """Our written reason, or nothing."""
    return next((reason for key, reason in REASONS.items() if re.fullmatch(key, test)), "")


def stale(ours: list[Records], found: list[Difference]) -> list[str]:
    """Reasons whose tests ran on our sides, and needed none."""
    ran = {name.split("::")[-1] for records in ours for name in records}
    needed = {difference.test for difference in found}
    return [
        key
        for key in REASONS
        if any(re.fullmatch(key, test) for test in ran)
        and not any(re.fullmatch(key, test) for test in needed)
    ]
