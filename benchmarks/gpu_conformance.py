"""The conformance suite of `triton` and `merged` on the GPU, as a record of what passed.

    python benchmarks/gpu_conformance.py --seconds 150 --processes 8 --json FILE [--rehearse]

Most of the time goes into compiling kernels, so several processes run a share of the cases each; Triton keeps
what they compile on disk for all of them. On CUDA `merged` skips every case in float64, for which it has no
fused kernel there: its proof on a GPU is the cases of lower precision.

Exit status: 0 where both backends ran cases and none failed; 1 where one failed, time ran out, or the suite
could not run; 2 wrong use, or no GPU. A rehearsal runs a few cases on the CPU, of the backends that can be
used there, `triton` with TRITON_INTERPRET=1.
"""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from gpu_device import gpu_circumstances, require_gpu
from records import append, count, seconds, writable
from relpos.backends import BACKENDS
from relpos.backends.triton import backend as triton

Counts = dict[str, dict[str, int]]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
SUITE = "tests/conformance"
NEEDED = ("merged", "triton")
SELECTED = "triton or merged"
REHEARSED = "(triton or merged) and equals_the_reference and about"
# the suite's own settings need plugins that a machine with a GPU may lack
PLAIN = ("-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider")
OUTCOMES = ("passed", "failed", "skipped")
MOST_NAMES, MOST_PROCESSES = 50, 8
SECONDS = 150.0
# of pytest, where the share of a process has been run: all passed, some failed, there was none
FINISHED = (0, 1, 5)
# from the signal to stop until the end
GRACE = 20.0


class Ended(NamedTuple):
    """How one process ended.

    Args:
        status: of pytest, None where time ran out.
        counts: of cases by backend and outcome. failed: names of cases.
        has_report: whether it wrote what ran.
    """

    status: int | None
    counts: Counts
    failed: list[str]
    has_report: bool = True


def main(arguments: list[str] | None = None) -> int:
    """Run the suite, append its record to --json, say how it went, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    require_gpu(options.rehearse)
    writable(parser, options.json)
    found = run_suite(options.select or (REHEARSED if options.rehearse else SELECTED), options)
    start = {"what": "conformance", "run": options.run, **gpu_circumstances(options.rehearse)}
    append(options.json, {**start, **found})
    counts = "; ".join(f"{name} {_in_words(x)}" for name, x in found["counts"].items()) or "no case ran"
    print(f"conformance: {'passed' if found['is_passed'] else 'NOT PASSED'}, {counts}")
    if found["reason"]:
        print(f"conformance: {found['reason']}")
    return int(not found["is_passed"])


def run_suite(select: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the cases that `select` names came to.

    Returns:
        Counts by backend, the names of failed cases (MOST_NAMES at most), processes, seconds, whether every
        case was run, whether the suite is passed, and otherwise the reason.
    """
    missing = [name for name in ("pytest", "hypothesis") if not _is_installed(name)]
    if missing:
        needs = " and ".join(missing)
        return _found([], 0.0, f"the suite needs {needs}, not installed here; it was not run")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = _run_processes(select, Path(folder), options)
    reason = why_not_passed(ended, _rehearsed() if options.rehearse else NEEDED, options.seconds)
    return _found(ended, time.monotonic() - began, reason)


def read_report(report: Path) -> tuple[Counts, list[str]]:
    """Counts of passed, failed and skipped cases by backend, and the names of those that failed.

    Args:
        report: the XML that pytest writes for --junit-xml.
    """
    counts: Counts = {}
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
        backend = re.search(rf"[\[-]({'|'.join(NEEDED)})[\]-]", name)
        of_backend = counts.setdefault(backend[1] if backend else "others", dict.fromkeys(OUTCOMES, 0))
        of_backend[outcome] += 1
    return counts, failed


def merged_counts(ended: Iterable[Ended]) -> Counts:
    """The counts of all processes together."""
    counts: Counts = {}
    for process in ended:
        for backend, found in process.counts.items():
            of_backend = counts.setdefault(backend, dict.fromkeys(OUTCOMES, 0))
            for outcome, number in found.items():
                of_backend[outcome] += number
    return counts


def why_not_passed(ended: list[Ended], needed: Iterable[str], limit: float) -> str | None:
    """Why the suite is no proof, with each process that failed or was stopped; None where it is one."""
    counts = merged_counts(ended)
    num_failed = sum(x["failed"] for x in counts.values())
    cases = "1 case" if num_failed == 1 else f"{num_failed} cases"
    reasons = [f"{cases} failed"] if num_failed else []
    for number, process in enumerate(ended, 1):
        what = f"process {number} of {len(ended)}"
        without = "" if process.has_report else ", without a report"
        if process.status is None:
            reasons.append(f"{what} was stopped after {limit:g} s{without}")
        elif process.status not in FINISHED or (process.status == 1 and not process.failed) or without:
            reasons.append(f"{what} ended with status {process.status}{without}")
    for name in needed:
        if counts.get(name, {"passed": 0})["passed"] == 0:
            reasons.append(f"no case of {name} passed")
    return "; ".join(reasons) or None


def _rehearsed() -> list[str]:
    """The backends that can be used here, `triton` where there is an interpreter of its kernels."""
    names = [backend.name for backend in BACKENDS if backend.name in NEEDED]
    return [name for name in names if name != "triton" or triton.UNAVAILABLE is None]


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _run_processes(select: str, folder: Path, options: argparse.Namespace) -> list[Ended]:
    """How each process ended; what had run by then is in its report, and what it said is printed."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(1, options.processes + 1):
            running.append(_start(select, folder, number, options))
        statuses = _wait(running, options.seconds)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    ended = []
    for number, status in enumerate(statuses, 1):
        print(f"-- process {number} of {len(statuses)}")
        print(_output(folder, number).read_text(errors="replace"), end="", flush=True)
        ended.append(_ended(status, _report(folder, number)))
    return ended


def _start(select: str, folder: Path, number: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Pytest with one share of the cases."""
    command = [sys.executable, "-m", "pytest", SUITE, "-k", select, *PLAIN]
    command += ["-p", "gpu_shares", "--share", f"{number}/{options.processes}"]
    command += ["-q", "-rfE", "--tb=short", f"--junit-xml={_report(folder, number)}"]
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    device = "cpu" if options.rehearse else "cuda"
    with _output(folder, number).open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            # options of a run of pytest around this one are not for its shares
            env={
                **os.environ,
                "PYTEST_ADDOPTS": "",
                "RELPOS_TEST_DEVICE": device,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            # a shell has what it runs in the background ignore this signal
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )


def _report(folder: Path, number: int) -> Path:
    return folder / f"report-{number}.xml"


def _output(folder: Path, number: int) -> Path:
    return folder / f"output-{number}.txt"


def _wait(running: list[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """The status of each process; None where it ran on at the end of the limit, and was stopped."""
    end = time.monotonic() + limit
    statuses = [_status(process, end) for process in running]
    late = [process for process, status in zip(running, statuses, strict=True) if status is None]
    for process in late:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + GRACE
    for process in late:
        _status(process, end)
    return statuses


def _status(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Of the process, as soon as it has one; None where it has none at the end."""
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None


def _ended(status: int | None, report: Path) -> Ended:
    try:
        return Ended(status, *read_report(report))
    except (FileNotFoundError, ElementTree.ParseError):
        # it was killed before the report was whole
        return Ended(status, {}, [], has_report=False)


def _found(ended: list[Ended], taken: float, reason: str | None) -> dict[str, Any]:
    failed = [name for process in ended for name in process.failed]
    return {
        "counts": merged_counts(ended),
        "failed": failed[:MOST_NAMES],
        "processes": len(ended),
        "suite_seconds": round(taken, 1),
        "is_finished": bool(ended) and all(x.status in FINISHED and x.has_report for x in ended),
        "is_passed": reason is None,
        "reason": reason,
    }


def _num_cores() -> int:
    """Of the processor's cores those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--json", type=Path, help="append a line", metavar="FILE")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help="name of the run; default: the time")
    add("--seconds", type=seconds, default=SECONDS, help=f"after which it is stopped; default: {SECONDS:g}")
    most = min(MOST_PROCESSES, _num_cores())
    add("--processes", type=count, default=most, help=f"that share the cases; default here: {most}")
    add("--select", help=f"cases, as pytest -k; default: {SELECTED}", metavar="EXPRESSION")
    add("--rehearse", action="store_true", help="a few cases on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
