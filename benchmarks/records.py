"""What the benchmarks share on the command line: numbers as options, and files of JSON lines."""

import argparse
import json
import math
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from machine import commit, device_name, kernel


def number(kind: type, least: float, below: float, text: str) -> Any:
    """`text` as a number from `least` on and below `below`, for the `type` of an option."""
    name = "an integer" if kind is int else "a number"
    bounds = f"of at least {least}" if below == math.inf else f"from {least} on and below {below}"
    try:
        found = kind(text)
    except ValueError:
        found = math.nan
    if not least <= found < below:
        raise argparse.ArgumentTypeError(f"must be {name} {bounds}; got {text!r}")
    return found


count = partial(number, int, 1, math.inf)
share = partial(number, float, 0, 1)
seconds = partial(number, float, 0, math.inf)


def gibibytes(text: str) -> float:
    """`text` as a number of GiB above 0: without memory nothing runs."""
    found: float = number(float, 0, math.inf, text)
    if found == 0:
        raise argparse.ArgumentTypeError(f"must be above 0; got {text!r}")
    return found


def circumstances(device: str, threads: int) -> dict[str, Any]:
    """What a figure depends on beside what was measured."""
    return {
        "device": device,
        "device_name": device_name(device),
        "machine": platform.machine(),
        "threads": threads,
        "torch": torch.__version__,
        "commit": commit(),
        "kernel": kernel(),
    }


def writable(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End as wrong use where the file of --json cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        parser.error(f"argument --json: {error}")


def append(path: Path | None, record: dict[str, Any]) -> None:
    """Add the record as a line, or end with a line that says why it cannot be written."""
    if path is None:
        return
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        sys.exit(f"error: argument --json: {path}: {error.strerror}")


def read(path: Path | None) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file.

    Raises:
        ValueError: a line is no record.
    """
    if path is None or not path.exists():
        return []
    records = []
    for number_of_line, line in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            raise ValueError(
                f"line {number_of_line} of {path} must be JSON; got {line[:40]!r}. Remove it."
            ) from None
    return records
