"""The conformance suite of `triton` and `merged` on the GPU, as a record of its outcomes.

    python benchmarks/gpu_conformance.py --seconds 150 --processes 8 --json FILE [--rehearse]

Most of the time goes into compiling kernels, so several processes of pytest-xdist share the cases; without it
one process runs them all. On CUDA `merged` skips every case in float64, for which it has no fused kernel there:
the cases of lower precision test it. A rehearsal runs a few cases on the CPU, with the backends that work
there; `triton` needs TRITON_INTERPRET=1.

Exit status: 0 if both backends ran cases and none failed; 1 if one failed, time ran out, or the suite could not
run; 2 for wrong use, or without a GPU.
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
from pathlib import Path
from xml.etree import ElementTree

import torch

from aims import counts
from machine import circumstances, require_gpu
from records import Record, append, at_least_zero, count, writable
from relpos.backends import triton

ROOT = Path(__file__).parents[1]
SUITE = "tests/conformance"
BACKENDS = ("merged", "triton")
SELECTED = "triton or merged"
REHEARSED = "(triton or merged) and equals_the_reference and about"
# the suite's own settings need plugins that a machine with a GPU may lack
PLAIN = ("-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider")
OUTCOMES = ("passed", "failed", "skipped")
MOST_NAMES, MOST_PROCESSES = 50, 8
SECONDS = 150.0
# seconds from the signal to stop until the end
GRACE = 20.0


def main(arguments: list[str] | None = None) -> int:
    """Run the suite, append its record to --json, print the outcome, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    require_gpu(options.rehearse)
    writable(parser, options.json)
    found = run_suite(options)
    start = {"what": "conformance", "run": options.run}
    device, threads = "cpu" if options.rehearse else "cuda", torch.get_num_threads()
    append(options.json, start | circumstances(device, threads, is_rehearsal=options.rehearse) | found)
    print(f"conformance: {'passed' if found['is_passed'] else 'NOT PASSED'}, {counts(found)}")
    if found["reason"]:
        print(f"conformance: {found['reason']}")
    return int(not found["is_passed"])


def run_suite(options: argparse.Namespace) -> Record:
    """Counts of outcomes by backend, names of failed cases, and the reason if the suite is not passed."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    began = time.monotonic()
    found: dict[str, dict[str, int]] = {}
    failed: list[str] = []
    status: int | None = 0
    if not missing:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            status = _run(report, options)
            if report.exists():
                found, failed = read_report(report)
    needed = BACKENDS if triton.UNAVAILABLE is None or not options.rehearse else BACKENDS[:1]
    reasons = [
        *(f"the suite needs {name}, which is not installed" for name in missing),
        *([f"{len(failed)} cases failed"] if failed else []),
        *([f"it was stopped after {options.seconds:g} s"] if status is None else []),
        *([f"pytest ended with status {status}"] if status not in (0, 1, None) else []),
        *(f"no case of {x} passed" for x in needed if not found.get(x, {}).get("passed")),
    ]
    return {
        "counts": found,
        "failed": failed[:MOST_NAMES],
        "suite_seconds": round(time.monotonic() - began, 1),
        "is_finished": not missing and status in (0, 1),
        "is_passed": not reasons and status == 0,
        "reason": "; ".join(reasons) or None,
    }


def read_report(report: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Counts of passed, failed and skipped cases by backend, and the names of those that failed.

    Args:
        report: the XML that pytest writes for --junit-xml.
    """
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


def _run(report: Path, options: argparse.Namespace) -> int | None:
    """The status of pytest; None if time ran out. The report has the cases that ran by then."""
    select = options.select or (REHEARSED if options.rehearse else SELECTED)
    command = [sys.executable, "-m", "pytest", SUITE, "-k", select, *PLAIN]
    command += ["-q", "-rfE", "--tb=short", f"--junit-xml={report}"]
    if options.processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(options.processes)]
    device = "cpu" if options.rehearse else "cuda"
    # options of a run of pytest around this one are not for it
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "RELPOS_TEST_DEVICE": device}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(options.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--json", type=Path, help="append a line", metavar="FILE")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help="name of the run; default: the time")
    add("--seconds", type=at_least_zero, default=SECONDS, help=f"limit of time; default: {SECONDS:g}")
    add("--processes", type=count, default=min(MOST_PROCESSES, cores), help="processes that share the cases")
    add("--select", help=f"cases, as pytest -k; default: {SELECTED}", metavar="EXPRESSION")
    add("--rehearse", action="store_true", help="run a few cases on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
