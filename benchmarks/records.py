"""Records of measurements, and the options of the scripts that make them.

A record is a line of JSON about one side of a comparison:

    what                      the benchmark; then its setting
    side                      the form, model or module that was measured
    seconds, wall_seconds     of one call, the median over the turns; see harness.py
    ratio_to, quartiles_to    by other side: the median and quartiles of the ratios within a turn
    peak_mib                  memory beyond the inputs
    reason, is_failure        why the side did not run, and whether that is an error; then the circumstances
"""

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]

EMPTY: Record = {
    "seconds": None,
    "wall_seconds": None,
    "ratio_to": {},
    "quartiles_to": {},
    "turns": 0,
    "peak_mib": None,
    "reason": None,
    "is_failure": False,
}


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
at_least_zero = partial(number, float, 0, math.inf)


def gibibytes(text: str) -> float:
    """`text` as a number of GiB above 0."""
    found: float = at_least_zero(text)
    if found == 0:
        raise argparse.ArgumentTypeError(f"must be above 0; got {text!r}")
    return found


def plain_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the documentation of the script."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=style, allow_abbrev=False)


def make_parser(doc: str | None, *, turns: int, seconds: float = 60.0) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = plain_parser(doc)
    add = parser.add_argument
    add("--turns", type=count, default=turns, help=f"turns of each side; default: {turns}")
    add("--seconds", type=at_least_zero, default=seconds, help="time for all turns; fewer turns beyond it")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--memory-limit", type=gibibytes, default=8.0, help="GiB for one call; a side is skipped beyond it")
    add("--json", type=Path, help="append a line for each record", metavar="FILE")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The options; sets torch's threads, and refuses a file of --json that cannot be written."""
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    return options


def writable(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End as wrong use if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        parser.error(f"argument --json: {error}")


def append(path: Path | None, record: Record) -> None:
    """Add the record to the file, or end with a line that says why it cannot be written."""
    if path is None:
        return
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        sys.exit(f"error: argument --json: {path}: {error.strerror}")


def read(path: Path | None) -> list[Record]:
    """The records of a file; none if there is no file.

    Raises:
        ValueError: a line is no record.
    """
    if path is None or not path.exists():
        return []
    records = []
    for line_number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            record["what"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"line {line_number} of {path} must be a record; got {line[:40]!r}. Remove it."
            ) from None
        records.append(record)
    return records


def read_or_end(parser: argparse.ArgumentParser, path: Path | None) -> list[Record]:
    """`read`, which ends as wrong use where a line is no record."""
    try:
        return read(path)
    except ValueError as error:
        parser.error(f"argument --json: {error}")
