"""Attention modules that return their weights: ours beside `torch.nn.MultiheadAttention`, in turns.

    python benchmarks/need_weights.py --threads 2 --json benchmarks/results/need_weights.jsonl

It takes less than 3 minutes on two quiet cores. The bound is 1.5 times torch's own time. "forward and
backward" has a gradient of the output alone, "of both" one of the weights too.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from measuring import SHORTEST_TURN, Runner, ratio, take_turns
from records import append, circumstances, count, writable
from relpos.nn import RelativeMultiheadAttention

LENGTHS = (128, 512, 2048)
WIDTH, HEADS, DISTANCE = 512, 8, 16
BOUND = 1.5
PASSES = ("no gradient", "forward", "forward and backward", "forward and backward of both")
COLUMNS = "{:>8}  {:30}  {:>10}  {:>10}  {:>6}  {}"


def main(arguments: list[str] | None = None) -> None:
    """Print each length and pass, and append them to --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=count, nargs="+", default=LENGTHS, help="tokens")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--turns", type=count, default=15, help="of both modules, for each length and pass")
    parser.add_argument("--json", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    around = circumstances("cpu", options.threads)
    print(COLUMNS.format("length", "pass", "torch", "relpos", "ratio", "at most 1.5"), flush=True)
    for length in options.lengths:
        for name in PASSES:
            runners = {side: _runner(step) for side, step in steps(length, name).items()}
            taken = take_turns(runners, "cpu", options.turns)
            found = {side: statistics.median(turns) for side, turns in taken.items()}
            compared = ratio(taken["relpos"], taken["torch"])
            record = {
                "length": length,
                "pass": name,
                "width": WIDTH,
                "heads": HEADS,
                "max_distance": DISTANCE,
            }
            append(options.json, record | {"seconds": found} | compared | {"turns": options.turns} | around)
            figures = (f"{1000 * found[side]:.2f} ms" for side in ("torch", "relpos"))
            verdict = "yes" if compared["ratio"] <= BOUND else "no"
            print(COLUMNS.format(length, name, *figures, compared["ratio"], verdict), flush=True)


def steps(length: int, name: str) -> dict[str, Callable[[], None]]:
    """One call of each module, with float32 tokens [1, length, width]."""
    torch.manual_seed(0)
    x = torch.randn(1, length, WIDTH)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = RelativeMultiheadAttention(WIDTH, HEADS, batch_first=True, max_distance=DISTANCE)

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(name != "no gradient"):
                out, weights = module(x, x, x)
            if name.endswith("backward"):
                out.sum().backward()
            elif name.endswith("both"):
                (out.sum() + weights.square().sum()).backward()

        return run

    return {"torch": step(theirs), "relpos": step(ours)}


def _runner(step: Callable[[], None]) -> Runner:
    step()
    started = time.perf_counter()
    step()
    once = time.perf_counter() - started
    repetitions = max(1, math.ceil(SHORTEST_TURN / once))
    return Runner(step, repetitions, once * repetitions)


if __name__ == "__main__":
    main()
