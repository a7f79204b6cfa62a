"""Training steps on a quiet machine and beside busy processes, by how OpenMP's threads wait.

    python benchmarks/busy_machine.py --json benchmarks/results/busy_machine.jsonl

Each way of waiting has a process of its own, since OpenMP reads its variables once. They take turns, first
alone, then beside `--busy` processes that compute without end, which are started and ended here. The default
takes about four minutes, on a machine that has nothing else to do.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from _relpos_command import CHOSEN, choose
from harness import Taken, timing
from machine import circumstances
from records import EMPTY, append, plain_parser, writable
from relpos.nn import RelativeTransformerEncoder, RelativeTransformerEncoderLayer
from table import head, show

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", CHOSEN)
BARE = {name: value for name, value in os.environ.items() if name not in NAMES}
SETTINGS = {
    "as it is": {},
    "commands": choose(BARE),
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
ME = [sys.executable, __file__]
SEQUENCES, LENGTH, WIDTH = 16, 32, 128
COLUMNS = ("side", "busy_processes", "steps_per_second")


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting, quiet and busy; print a row for each and append them to --json."""
    parser = plain_parser(__doc__)
    parser.add_argument("--busy", type=int, default=10, help="number of busy processes")
    parser.add_argument("--turns", type=int, default=6, help="of each setting, quiet and busy")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn; twice that beside busy ones")
    parser.add_argument("--json", type=Path, help="append a line for each setting", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return
    writable(parser, options.json)
    print(*head(COLUMNS), sep="\n", flush=True)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(_started([*ME, "--worker"], BARE | added))
            for name, added in SETTINGS.items()
        }
        taken = {0: take_turns(workers, options.turns, options.seconds)}
        for _ in range(options.busy):
            stack.enter_context(_started([sys.executable, "-c", "while True: pass"], BARE))
        taken[options.busy] = take_turns(workers, options.turns, 2 * options.seconds)
    for busy, found in taken.items():
        for name, added in SETTINGS.items():
            record = {"what": "busy_machine", "side": name, "busy_processes": busy, **EMPTY}
            record |= timing(name, found, ("as it is",))
            record["steps_per_second"] = round(1 / record["seconds"], 2)
            record["variables"] = {key: value for key, value in added.items() if key != CHOSEN}
            threads = 1 if name == "one thread" else len(os.sched_getaffinity(0))
            record |= circumstances("cpu", threads)
            append(options.json, record)
            print(show(record, COLUMNS), flush=True)


def take_turns(workers: dict[str, subprocess.Popen[str]], turns: int, seconds: float) -> dict[str, Taken]:
    """Seconds of a step of each worker in each turn; within a turn they run one after the other."""
    taken = {name: Taken([], []) for name in workers}
    for turn in range(turns):
        for name in random.Random(turn).sample(sorted(workers), len(workers)):
            print(seconds, file=workers[name].stdin, flush=True)
            taken[name].device.append(float(workers[name].stdout.readline()))
            taken[name].wall.append(taken[name].device[-1])
    return taken


def work() -> None:
    """In a process of its own: for each number of seconds on standard input, print seconds of a step."""
    step = make_step()
    step()
    for line in sys.stdin:
        seconds, steps, started = float(line), 0, time.perf_counter()
        while steps == 0 or time.perf_counter() - started < seconds:
            step()
            steps += 1
        print((time.perf_counter() - started) / steps, flush=True)


def make_step() -> Any:
    """A training step of two small encoder layers with relative positions."""
    torch.manual_seed(0)
    layer = RelativeTransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, max_distance=16)
    encoder = RelativeTransformerEncoder(layer, num_layers=2)
    optimiser = torch.optim.Adam(encoder.parameters())
    x = torch.randn(SEQUENCES, LENGTH, WIDTH)

    def step() -> None:
        encoder(x).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


@contextmanager
def _started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
