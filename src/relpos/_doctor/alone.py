"""The command `relpos` where the packages of its commands are missing: the doctor, help and the version."""

import os
import signal
import sys
from importlib.metadata import version

from relpos._doctor.report import write_report

_HELP = """Usage: relpos COMMAND

  Translate with relative position representations (Shaw, Uszkoreit and Vaswani, 2018).

Options:
  --version   Print the version.
  -h, --help  Show this message.

Commands:
  doctor [--json]  Show versions, machine, backends, and what is wrong.

Commands that need more packages, pip install "relpos[translate]":
  train      Train a translator as a recipe says.
  recipe     Print a recipe with every key.
  translate  Translate text line by line.
  evaluate   Score translations of a test set.
  seal       Seal a model anew after a change that you wanted.

Commands that need more packages, pip install "relpos[demo]":
  reproduce  Train and compare the variants of an experiment."""

_DOCTOR_HELP = """Usage: relpos doctor [--json]

  Show versions, machine, backends, and what is wrong."""


def run_alone(arguments: list[str], error: ImportError) -> int:
    """Run `doctor`, show help or the version, or say what `error` kept another command from.

    Returns the exit code.

    Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
    """
    try:
        if arguments[:1] in (["--help"], ["-h"]):
            print(_HELP, flush=True)
            return 0
        if arguments[:1] == ["--version"]:
            print(f"relpos {version('relpos')}", flush=True)
            return 0
        if arguments[:1] != ["doctor"]:
            return _fail(
                f'the commands need more packages ({error}): pip install "relpos[translate]"; '
                "relpos doctor runs without.",
                1,
            )
        if "--help" in arguments or "-h" in arguments:
            print(_DOCTOR_HELP, flush=True)
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
