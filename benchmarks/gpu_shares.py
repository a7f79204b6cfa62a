"""A share of a run's cases, so that several processes run all of them at once: a plugin for pytest.

    PYTHONPATH=benchmarks python -m pytest -p gpu_shares --share 2/8

Which share has a case follows from its name alone, so that processes need not know of each other.
"""

import argparse
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take --share."""
    parser.addoption(
        "--share", type=share, default=(1, 1), metavar="NUMBER/OF", help="run this share of the cases alone"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to other shares."""
    number, of = config.getoption("--share")
    others = [item for item in items if share_of(item.nodeid, of) != number]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if share_of(item.nodeid, of) == number]


def share_of(name: str, of: int) -> int:
    """The number of the share that has the case of this name, from 1 to `of`."""
    return zlib.crc32(name.encode()) % of + 1


def share(text: str) -> tuple[int, int]:
    """(number, of) out of "2/8", for the `type` of an option."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be a number and of how many, like 2/8; got {text!r}")
    return int(number), int(of)
