"""Sizes at which the CPU kernel is not the fastest backend: cpu, merged and dense over a grid of settings.

    python benchmarks/crossover.py --threads 2 --json benchmarks/results/crossover.jsonl

Prints every cell, then the cells in which cpu takes more than --slower times the time of another backend;
thresholds of dispatch come from these. RELPOS_CPU=avx2 or baseline measures the kernel's other instruction
sets. With --json a cell that was measured before, with the same kernel, commit and threads, is read and not
measured again.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product

from forms import PASSES, Setting
from harness import Plan, compare, find, start_record
from records import Record, append, count, make_parser, number, parse, read_or_end
from table import head, show

NAMES = ("cpu", "merged", "dense")
COLUMNS = ("setting", "pass")
# 4,096 tokens fill both cores many times over; a batch of 1 has one task a head
TOKENS = 4096


def grids() -> dict[str, list[Setting]]:
    """Settings by the field that varies in them, without the backward pass."""
    lengths = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    some = [Setting(length=n, batch=max(1, TOKENS // n)) for n in (8, 32, 128, 512, 1024)]
    return {
        "length": [Setting(length=n, batch=b) for n in lengths for b in dict.fromkeys((1, TOKENS // n))],
        "queries": [
            Setting(length=keys, queries=queries, batch=b, is_causal=True)
            for queries, keys, b in product((1, 4, 16), (16, 128, 1024, 8192), (1, 8))
        ],
        "k": [replace(x, max_distance=k) for k in (0, 4, 64, 256) for x in some],
        "labels": [replace(x, is_labelled=True) for x in some],
        "causal": [replace(x, is_causal=True) for x in some],
        "padding": [replace(x, padding=0.5) for x in some],
        "mask": [replace(x, padding=0.5, is_masked=True) for x in some],
        "dropout": [replace(x, dropout=0.1) for x in some],
        "width": [replace(x, d_k=width) for width in (8, 16, 32, 128, 256) for x in some],
        "dtype": [replace(x, dtype=dtype) for dtype in ("float64", "bfloat16", "float16") for x in some],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that --json does not hold, and print those in which cpu is slower."""
    parser = make_parser(__doc__, turns=9, seconds=10.0)
    add = parser.add_argument
    add("--grids", nargs="+", choices=list(grids()), default=list(grids()), help="fields that vary")
    add("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
    add("--tokens", type=count, default=8192, help="leave out settings with more keys or more queries")
    add("--slower", type=partial(number, float, 0, float("inf")), default=1.1, help="ratio to report")
    options = parse(parser, arguments)
    known = read_or_end(parser, options.json)
    plan = Plan(options.turns, options.seconds, options.memory_limit, options.threads)
    print(*head(COLUMNS), sep="\n", flush=True)
    slower, status = [], 0
    for grid, setting in _cells(options):
        start = start_record("crossover", setting, options.threads, grid=grid)
        found = find(known, start, NAMES, "grid")
        if not any(x["side"] == "cpu" for x in found):
            found = compare(NAMES, setting, plan, start, against=NAMES[1:])
            for record in found:
                append(options.json, record)
        own = next(x for x in found if x["side"] == "cpu")
        print(_row(own), flush=True)
        status |= any(x["is_failure"] for x in found)
        if any(x > options.slower for x in own["ratio_to"].values()):
            slower.append(own)
    print(f"\ncpu takes more than {options.slower:g} times another backend's time in {len(slower)} cells")
    print(*map(_row, slower), sep="\n")
    return status


def _cells(options: argparse.Namespace) -> Iterator[tuple[str, Setting]]:
    for grid, settings in grids().items():
        for plain in settings if grid in options.grids else ():
            if max(plain.length, plain.num_queries * plain.batch) > options.tokens:
                continue
            # decoding needs no gradients
            for name in options.passes if plain.queries is None else ("forward",):
                if name in options.passes:
                    yield grid, replace(plain, has_backward=name == "both")


def _row(record: Record) -> str:
    words = [f"n {record['length']}", f"b {record['batch']}"]
    for name, usual in asdict(Setting(length=1)).items():
        if name not in ("length", "batch", "has_backward") and record[name] != usual:
            words.append(name if record[name] is True else f"{name} {record[name]}")
    return show({**record, "setting": ", ".join(words)}, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
