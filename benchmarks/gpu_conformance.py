"""A report of the conformance suite on a GPU as a record: outcomes by backend, and whether it passed.

    python benchmarks/gpu_conformance.py REPORT.xml --status 0 --json FILE

gpu_check.sh runs the suite and calls this. Exit status: 0 if both backends ran cases and none failed, else 1.
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from aims import counts
from machine import circumstances
from records import Record, append, plain_parser, writable
from relpos.backends.triton import backend as triton

BACKENDS = ("merged", "triton")
OUTCOMES = ("passed", "failed", "skipped")
MOST_NAMES = 50


def main(arguments: list[str] | None = None) -> int:
    """Append the record to --json, print the outcome, and return the exit status."""
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("report", type=Path, help="XML that pytest wrote for --junit-xml", metavar="REPORT.xml")
    add("--status", type=int, required=True, help="exit status of pytest, or of `timeout`")
    add("--json", type=Path, help="append a line", metavar="FILE")
    add("--run", help="name of the run")
    add("--rehearse", action="store_true", help="the suite ran on the CPU")
    options = parser.parse_args(arguments)
    writable(parser, options.json)
    # a rehearsal without Triton's interpreter has merged only
    needed = BACKENDS if triton.UNAVAILABLE is None or not options.rehearse else BACKENDS[:1]
    found = outcome(options.report, options.status, needed)
    around = circumstances("cpu" if options.rehearse else "cuda", 1, is_rehearsal=options.rehearse)
    append(options.json, {"what": "conformance", "run": options.run, **around, **found})
    print(f"conformance: {'passed' if found['is_passed'] else 'NOT PASSED'}, {counts(found)}")
    if found["reason"]:
        print(f"conformance: {found['reason']}")
    return int(not found["is_passed"])


def outcome(report: Path, status: int, needed: tuple[str, ...] = BACKENDS) -> Record:
    """Counts by backend, names of failed cases, and the reason if the suite is not passed."""
    found: dict[str, dict[str, int]] = {}
    failed: list[str] = []
    try:
        found, failed = read_report(report)
    except (FileNotFoundError, ElementTree.ParseError):
        # pytest was killed before the report was whole
        status = status or 1
    reasons = [f"{len(failed)} failed"] if failed else []
    if status and not (status == 1 and failed):
        reasons.append("time ran out" if status in (2, 124, 137) else f"pytest ended with status {status}")
    reasons += [f"no case of {x} passed" for x in needed if not found.get(x, {}).get("passed")]
    return {
        "counts": found,
        "failed": failed[:MOST_NAMES],
        "is_finished": status in (0, 1),
        "is_passed": not reasons,
        "reason": "; ".join(reasons) or None,
    }


def read_report(report: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Counts of passed, failed and skipped cases by backend, and the names of those that failed."""
    found: dict[str, dict[str, int]] = {}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name")
        if name is None:
            # it was interrupted
            continue
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed.append(name)
        elif case.find("skipped") is not None:
            outcome = "skipped"
        # a parameter of the case, test_name[length 17-merged]
        backend = re.search(rf"[\[-]({'|'.join(BACKENDS)})[\]-]", name)
        found.setdefault(backend[1] if backend else "others", dict.fromkeys(OUTCOMES, 0))[outcome] += 1
    return found, failed


if __name__ == "__main__":
    sys.exit(main())
