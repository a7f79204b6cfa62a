"""A process that has everything imported and runs each command in a child of its own, within bounds.

A child is forked from what has run nothing yet: no thread, no state of an earlier case. Jobs and results
are lines of JSON on the standard streams.
"""

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

_UNCAUGHT = 99


def serve() -> None:
    """Answer jobs until there are no more."""
    jobs, results = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    import relpos.cli  # noqa: F401

    for line in jobs:
        job = json.loads(line)
        if "modules" in job:
            _import(json.loads(Path(job["modules"]).read_text()))
            result: dict[str, Any] = {}
        else:
            result = _attend(job)
        print(json.dumps(result), file=results, flush=True)


def _import(modules: list[str]) -> None:
    """Import what a command has imported, whatever part of it cannot be imported by its name."""
    for name in modules:
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def _attend(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child and say how it ended; one over its time is killed."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = _UNCAUGHT
        try:
            code = _child(job)
        finally:
            os._exit(code)
    is_killed = False
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if not is_killed and time.monotonic() - began > job["wall_seconds"]:
            is_killed = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.003)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "is_killed": is_killed or os.waitstatus_to_exitcode(status) == -signal.SIGXCPU,
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.monotonic() - began,
        # KiB on Linux
        "peak": used.ru_maxrss << 10,
    }


def _child(job: dict[str, Any]) -> int:
    os.setsid()
    for number, (name, flags) in enumerate(
        ((job["stdin"], os.O_RDONLY), (job["stdout"], os.O_WRONLY), (job["stderr"], os.O_WRONLY))
    ):
        os.dup2(os.open(name, flags | os.O_CREAT), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    os.chdir(job["folder"])
    os.environ["TMPDIR"], tempfile.tempdir = job["scratch"], None
    if job["site"]:
        sys.path.insert(0, job["site"])
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    if job["cpu_seconds"]:
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 5))
        # what asks for more fails, and does not take the machine with it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (6 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from relpos.cli import run

    # names that are not UTF-8 come as Python gets them from a shell
    try:
        code = run([os.fsdecode(bytes.fromhex(argument)) for argument in job["arguments"]])
    except BaseException:
        traceback.print_exc()
        code = _UNCAUGHT
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if job["imported"]:
        Path(job["imported"]).write_text(json.dumps(list(sys.modules)))
    return code


if __name__ == "__main__":
    serve()
