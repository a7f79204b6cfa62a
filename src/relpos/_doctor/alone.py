"""The command `relpos` where the packages of its commands are missing: the doctor alone."""

import os
import signal
import sys

from relpos._doctor.report import write_report

_HELP = """Usage: relpos doctor [--json]

  Show versions, machine, backends, and what is wrong."""


def run_alone(arguments: list[str], error: ImportError) -> int:
    """Run `doctor`, or say of another command what `error` kept it from; returns the exit code.

    Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
    """
    try:
        if arguments[:1] != ["doctor"]:
            return _fail(
                f'the commands need more packages ({error}): pip install "relpos[translate]"; '
                "relpos doctor runs without.",
                1,
            )
        if "--help" in arguments:
            print(_HELP, flush=True)
            return 0
        unknown = [argument for argument in arguments[1:] if argument != "--json"]
        if unknown:
            return _fail(f"doctor takes --json and nothing else; got {unknown[0]!r}.", 2)
        write_report(as_json="--json" in arguments)
        return 0
    except KeyboardInterrupt:
        return _fail("stopped.", 128 + signal.SIGINT)
    except OSError as failure:
        # Python would write what is left once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # a reader that has left is no failure
        return 0 if isinstance(failure, BrokenPipeError) else _fail(f"{failure.strerror}.", 1)


def _fail(message: str, code: int) -> int:
    print(f"relpos: {' '.join(message.split())}", file=sys.stderr)
    return code
