"""A command that is stopped where it takes too long, on systems that have no `timeout`.

    python benchmarks/gpu_limited.py SECONDS COMMAND [ARGUMENT ...]

Exit status: that of the command; 137 where it and all that it started were killed; 2 wrong use.
"""

import os
import signal
import subprocess
import sys

KILLED = 128 + signal.SIGKILL


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) < 2 or not given[0].isdecimal():
        print(f"error: a whole number of seconds and a command are needed; got {given}.", file=sys.stderr)
        return 2
    # with a group of its own, which can be killed as a whole
    process = subprocess.Popen(given[1:], start_new_session=True)
    try:
        status = process.wait(int(given[0]))
    except subprocess.TimeoutExpired:
        return KILLED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # as a shell says by which signal it ended
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
