"""Time and memory of attention: torch's without positions, forms of other libraries, relpos's backends.

    python benchmarks/attention.py --lengths 64 256 1024 --pass forward both --json FILE
    python benchmarks/attention.py --cells gpu --budget 240 --json FILE

All forms take turns in one process, in a random order. Time is that of one call, the median over the turns,
and ratios are medians of the ratios within a turn. Memory is the most that a call held at one time: inputs and
masks excluded, outputs and gradients included. A pass is "forward", or "both": forward, then the gradients of
query, key, value and both tables.

With --cells the forms and settings are those of cells.py: on a GPU, or small ones on the CPU for a rehearsal,
which measures nothing. Each form is compared with the reference before it is timed. The most important cells
come first, and those that the budget does not reach are named. The same --run goes on where it ended.

Exit status: 0; 1 if a backend of relpos failed; 2 for wrong use, or without a GPU; 3 if a form broke the device
for this process, and the same --run should be started again.
"""

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial

import torch

from cells import Budget, cells, label
from forms import DTYPES, FORMS, ON_CPU, ON_GPU, PASSES, Setting
from harness import DeviceLost, Plan, compare, start_record
from machine import require_gpu
from records import Record, append, at_least_zero, count, make_parser, number, parse, read_or_end, share
from relpos.backends import BACKENDS
from table import head, show

COLUMNS = ("side", "pass", "length")
OURS = {backend.name for backend in BACKENDS}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.cells:
        # a GPU's forms need few turns and much memory; what is given explicitly stays
        parser.set_defaults(turns=2 if options.cells == "rehearsal" else 20, seconds=3.0, memory_limit=64.0)
    options = parse(parser, arguments)
    if options.cells:
        require_gpu(options.cells == "rehearsal")
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    print(*head((*COLUMNS, "d_k", "max_distance") if options.cells else COLUMNS), sep="\n", flush=True)
    records = [x for x in read_or_end(parser, options.json) if x.get("run") == options.run]
    try:
        records += _measure_cells(records, options) if options.cells else _measure(options)
    except DeviceLost as lost:
        _write(lost.records, options)
        print(f"error: {lost}. Start the same --run again.", file=sys.stderr)
        return 3
    return int(any(x.get("is_failure") and x["side"] in OURS for x in records))


def _measure(options: argparse.Namespace) -> list[Record]:
    names = list(dict.fromkeys(["sdpa", *options.backends]))
    plan = Plan(options.turns, options.seconds, options.memory_limit, options.threads)
    records = []
    for length in options.lengths:
        for name in dict.fromkeys(options.passes):
            setting = Setting(
                length,
                options.batch,
                options.heads,
                options.d_k,
                options.max_distance,
                options.dtype,
                options.device,
                is_causal=options.causal,
                padding=options.padding,
                dropout=options.dropout,
                has_backward=name == "both",
            )
            start = start_record("attention", setting, options.threads, run=options.run)
            records += compare(names, setting, plan._replace(has_memory=options.memory), start)
            _write(records[-len(names) :], options)
    return records


def _measure_cells(done: list[Record], options: argparse.Namespace) -> list[Record]:
    is_rehearsal = options.cells == "rehearsal"
    plan = Plan(options.turns, options.seconds, options.memory_limit, options.threads, is_checked=True)
    plan = plan._replace(has_memory=not is_rehearsal)
    budget, records, left_out = Budget(options.budget), [], []
    for setting in cells(is_rehearsal):
        known = {x["side"] for x in done if asdict(setting).items() <= x.items()}
        names = [name for name in ON_GPU if name not in known]
        if names and budget.is_spent():
            left_out.append(label(setting))
        elif names:
            start = start_record(
                "attention", setting, options.threads, is_rehearsal=is_rehearsal, run=options.run
            )
            against, refused = ("sdpa_flash", "gather"), budget.refused()
            found = compare(names, setting, plan, start, against=against, refused=refused)
            for record in found:
                if record["side"] in budget.compiling:
                    budget.compiling[record["side"]] += record["prepare_seconds"] or 0
            _write(found, options)
            records += found
    if left_out:
        rest = {"what": "left out", "run": options.run, "rehearsal": is_rehearsal}
        append(options.json, {**rest, "budget": options.budget, "cells": left_out})
        print(f"The budget of {options.budget:g} s was spent before {len(left_out)} cells:")
        print(*left_out, sep="\n")
    return records


def _write(records: list[Record], options: argparse.Namespace) -> None:
    for record in records:
        append(options.json, record)
        print(show(record, (*COLUMNS, "d_k", "max_distance") if options.cells else COLUMNS), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, turns=15)
    add = parser.add_argument
    add("--lengths", nargs="+", type=count, default=[64, 256, 1024], help="tokens", metavar="N")
    add("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
    add("--backends", nargs="+", choices=FORMS, default=ON_CPU, help="forms; sdpa always runs")
    add("--batch", type=count, default=1)
    add("--heads", type=count, default=8)
    add("--d-k", type=count, default=64, help="width of a head")
    add("--max-distance", type=partial(number, int, 0, float("inf")), default=16, help="k")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--causal", action="store_true", help="no query attends to a later key")
    add("--padding", type=share, default=0.0, help="share of each sequence that is padding, 0 to 1")
    add("--dropout", type=share, default=0.0, help="probability of dropping a weight, 0 to 1")
    add("--no-memory", action="store_false", dest="memory", help="measure time only")
    add("--cells", choices=("gpu", "rehearsal"), help="measure the settings of cells.py, not those above")
    add("--budget", type=at_least_zero, default=240.0, help="seconds after which no cell begins")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help="name of the run; default: the time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
