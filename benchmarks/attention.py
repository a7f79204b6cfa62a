"""Time and memory of attention: torch's without positions, forms of other libraries, relpos's backends.

    python benchmarks/attention.py --lengths 64 256 1024 --pass forward both --json FILE
    python benchmarks/attention.py --cells gpu --budget 240 --json FILE

All forms take turns in one process, in a random order. Time is that of one call, the median over the turns,
and ratios are medians of the ratios within a turn. Memory is the most that a call held at one time: inputs
and masks excluded, outputs and gradients included. A pass is "forward", or "both": forward, then the
gradients of query, key, value and both tables.

With --cells the settings are those of cells.py: on a GPU, or small ones on the CPU for a rehearsal, which
measures nothing. Each form is compared with the reference before it is timed. No cell begins after --budget.
The same --run goes on where it ended.

Exit status: 0; 1 if a backend of relpos failed; 2 for wrong use, or without a GPU; 3 if a form broke the GPU
for this process, and the same --run should be started again.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from cells import cells
from forms import DTYPES, FORMS, ON_CPU, PASSES, Setting
from harness import Clock, Plan, compare, say, start_record
from machine import require_gpu
from records import append, at_least_zero, count, make_parser, number, parse, read_or_end, share
from relpos.backends import BACKENDS
from table import head, show

COLUMNS = ("side", "pass", "is_causal", "d_k", "max_distance", "length")
OURS = {backend.name for backend in BACKENDS}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and return the exit status."""
    parser = _parser()
    is_rehearsal = parser.parse_args(arguments).cells == "rehearsal"
    if parser.parse_args(arguments).cells:
        # a GPU's forms need few turns and much memory
        parser.set_defaults(turns=1 if is_rehearsal else 20, seconds=3.0, memory_limit=64.0)
    options = parse(parser, arguments)
    if options.cells:
        require_gpu(is_rehearsal)
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    plan = Plan(options.turns, options.seconds, options.memory_limit, options.threads)
    plan = plan._replace(is_checked=bool(options.cells), has_memory=options.memory and not is_rehearsal)
    against = ("sdpa_flash", "gather") if options.cells else ("sdpa",)
    records = [x for x in read_or_end(parser, options.json) if x.get("run") == options.run]
    print(*head(COLUMNS), sep="\n", flush=True)
    end = time.monotonic() + (options.budget if options.cells else float("inf"))
    for setting, names in cells(is_rehearsal) if options.cells else _settings(options):
        done = {x["side"] for x in records if asdict(setting).items() <= x.items()}
        names = [name for name in names if name not in done]
        start = start_record(
            "attention", setting, options.threads, is_rehearsal=is_rehearsal, run=options.run
        )
        if names and time.monotonic() >= end:
            say(start, "left out, because the budget is spent")
            continue
        found = compare(names, setting, plan, start, against=against) if names else []
        for record in found:
            append(options.json, record)
            print(show(record, COLUMNS), flush=True)
        records += found
        if any(x["is_failure"] for x in found) and Clock.is_lost(setting.device):
            print("error: a form broke the GPU. Start the same --run again.", file=sys.stderr)
            return 3
    return int(any(x.get("is_failure") and x["side"] in OURS for x in records))


def _settings(options: argparse.Namespace) -> Iterator[tuple[Setting, list[str]]]:
    """The settings that the options name, and their forms."""
    given = {x: getattr(options, x) for x in asdict(Setting(1)) if hasattr(options, x)}
    for length in options.lengths:
        for name in dict.fromkeys(options.passes):
            setting = Setting(length=length, has_backward=name == "both", **given)
            yield setting, list(dict.fromkeys(["sdpa", *options.backends]))


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
    add("--causal", action="store_true", dest="is_causal", help="no query attends to a later key")
    add("--padding", type=share, default=0.0, help="share of each sequence that is padding, 0 to 1")
    add("--dropout", type=share, default=0.0, help="probability of dropping a weight, 0 to 1")
    add("--no-memory", action="store_false", dest="memory", help="measure time only")
    add("--cells", choices=("gpu", "rehearsal"), help="measure the settings of cells.py, not those above")
    add("--budget", type=at_least_zero, default=240.0, help="seconds after which no cell begins")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help="name of the run; default: the time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
