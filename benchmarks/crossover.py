"""Where the CPU kernel is not the fastest backend: cpu, merged and dense over a grid of sizes and settings.

    python benchmarks/crossover.py --threads 2 --json benchmarks/results/crossover.jsonl

Prints every cell, and in the end those where cpu takes more than --slower times the time of another backend.
Thresholds of dispatch are set from that. RELPOS_CPU=avx2 or baseline measures the kernel's other instruction
sets. With --json a cell that was measured before, by the same kernel, commit and threads, is read and not
measured again.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention_forms import Setting
from measuring import Plan, ratio, time_forms
from records import append, circumstances, count, gibibytes, number, read, seconds, writable

NAMES = ("cpu", "merged", "dense")
PASSES = ("forward", "both")
COLUMNS = "{:42}  {:8}  {:>12}  {:>12}  {:>12}"
# 4,096 tokens fill both cores many times over; a batch of 1 has one task a head
TOKENS = 4096


def grids() -> dict[str, list[Setting]]:
    """Settings by what varies in them; the backward pass comes on top."""
    lengths = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    plain = [Setting(length=n, batch=b) for n in lengths for b in dict.fromkeys((1, TOKENS // n))]
    some = [Setting(length=n, batch=max(1, TOKENS // n)) for n in (8, 32, 128, 512, 1024)]
    caches = (16, 128, 1024, 8192)
    return {
        "length": plain,
        "queries": [
            Setting(length=keys, queries=queries, batch=b, is_causal=True)
            for queries in (1, 4, 16)
            for keys in caches
            for b in (1, 8)
            if queries <= keys
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


def main(arguments: list[str] | None = None) -> None:
    """Measure what --json does not hold, and print where cpu is slower."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    around = circumstances("cpu", options.threads)
    try:
        done = {_identity(record): record for record in read(options.json) if "grid" in record}
    except ValueError as error:
        parser.error(f"argument --json: {error}")
    print(COLUMNS.format("setting", "pass", "cpu", "to merged", "to dense"), flush=True)
    slower = []
    for start, setting in _cells(options):
        record = done.get(_identity(start | around))
        if record is None:
            record = start | around | measure(setting, options)
            append(options.json, record)
        print(_row(record), flush=True)
        if any(x is not None and x > options.slower for x in record["ratio_to"].values()):
            slower.append(record)
    print(f"\ncpu takes more than {options.slower:g} times another backend's time in {len(slower)} cells")
    for record in slower:
        print(_row(record))


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each backend, the ratio of cpu to each other one, and why others did not run."""
    plan = Plan(options.turns, options.seconds, round(options.memory_limit * 2**30))
    taken, reasons = time_forms(NAMES, setting, plan)
    others = NAMES[1:]
    return {
        "seconds": {name: statistics.median(taken[name]) if name in taken else None for name in NAMES},
        "ratio_to": {
            name: ratio(taken["cpu"], taken[name])["ratio"] if {"cpu", name} <= taken.keys() else None
            for name in others
        },
        "turns": min((len(x) for x in taken.values()), default=0),
        "reasons": reasons,
    }


def _cells(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Setting]]:
    """What begins a record, and its setting."""
    for grid, settings in grids().items():
        if grid not in options.grids:
            continue
        for plain in settings:
            if max(plain.length, plain.num_queries * plain.batch) > options.tokens:
                continue
            for name in PASSES:
                # what decodes does not train
                if name in options.passes and not (name == "both" and plain.queries is not None):
                    setting = replace(plain, has_backward=name == "both")
                    yield {"grid": grid, "pass": name, **asdict(setting)}, setting


def _identity(record: dict[str, Any]) -> tuple:
    names = [*asdict(Setting(length=1)), "grid", "threads", "device_name", "torch", "commit", "kernel"]
    return tuple(record.get(name) for name in names)


def _row(record: dict[str, Any]) -> str:
    plain = asdict(Setting(length=1))
    shown = [f"n {record['length']}", f"b {record['batch']}"]
    left_out = ("length", "batch", "has_backward")
    for name, usual in plain.items():
        if name not in left_out and record[name] != usual:
            shown.append(name if record[name] is True else f"{name} {record[name]}")
    taken = record["seconds"]["cpu"]
    ratios = [record["ratio_to"][name] for name in NAMES[1:]]
    cells = ["-" if x is None else f"{x:.2f}" for x in ratios]
    milliseconds = "-" if taken is None else f"{taken * 1e3:.3f} ms"
    return COLUMNS.format(", ".join(shown), record["pass"], milliseconds, *cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--grids", nargs="+", choices=list(grids()), default=list(grids()), help="what varies")
    add("--pass", nargs="+", choices=PASSES, default=list(PASSES), dest="passes")
    add("--tokens", type=count, default=8192, help="leave out settings with more keys or more queries")
    add("--slower", type=partial(number, float, 0, float("inf")), default=1.1, help="ratio to report")
    add("--turns", type=count, default=9, help="of each backend")
    add("--seconds", type=seconds, default=10.0, help="fewer turns beyond that, for each cell")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--memory-limit", type=gibibytes, default=8.0, help="GiB; skip beyond it")
    add("--json", type=Path, help="append a line for each cell; go on where it ends", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
