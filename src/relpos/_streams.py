"""Standard streams that the caller has closed: `relpos translate model <&- 2>&-`."""

import os
import sys


def open_closed_streams() -> None:
    """Give each closed standard stream a file: reading and writing fail there, what is said is lost.

    Without one Python has None in its place, and the next file to be opened gets its number, which other
    libraries write to.
    """
    if sys.stdin is None:
        # opened the wrong way: that fails with "Bad file descriptor", and is told as any failure is
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
