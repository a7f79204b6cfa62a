"""Training steps per second on a quiet machine and beside busy processes, by how OpenMP's threads wait.

    python benchmarks/busy_machine.py --json benchmarks/results/busy_machine.jsonl

Each way of waiting has a process of its own, since OpenMP reads its variables once. They take turns, first
alone, then beside `--busy` processes that compute without end, which are started and ended here. The default
takes about four minutes, and wants a machine that has nothing else to do.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _relpos_command import CHOSEN, choose

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", CHOSEN)
BARE = {name: value for name, value in os.environ.items() if name not in NAMES}
SETTINGS = {
    "as it is": {},
    "commands": choose(BARE),
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SEQUENCES, LENGTH, WIDTH = 16, 32, 128


def main() -> None:
    """Measure every setting, quiet and busy; print a line for each and append them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=10, help="processes beside it")
    parser.add_argument("--turns", type=int, default=6, help="of each setting, quiet and busy")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn; twice that where it is busy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    from records import append, circumstances, writable

    writable(parser, options.json)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(added)) for name, added in SETTINGS.items()}
        speeds = {0: take_turns(workers, options.turns, options.seconds)}
        for _ in range(options.busy):
            stack.enter_context(_started([sys.executable, "-c", "while True: pass"]))
        speeds[options.busy] = take_turns(workers, options.turns, 2 * options.seconds)
    for busy, found in speeds.items():
        for name in SETTINGS:
            threads = 1 if name == "one thread" else len(os.sched_getaffinity(0))
            record = {**summary(name, found), "busy_processes": busy, **circumstances("cpu", threads)}
            print(json.dumps(record))
            append(options.json, record)


def take_turns(
    workers: dict[str, subprocess.Popen[str]], turns: int, seconds: float
) -> dict[str, list[float]]:
    """Steps per second of each worker in each turn; within a turn they run one after the other."""
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(turns):
        for name in random.Random(turn).sample(sorted(workers), len(workers)):
            speeds[name].append(_ask(workers[name], seconds))
    return speeds


def summary(name: str, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """The median speed of a setting, in steps per second, and its ratio to that of "as it is"."""
    from measuring import ratio

    return {
        "setting": name,
        "variables": {key: value for key, value in SETTINGS[name].items() if key != CHOSEN},
        "steps_per_second": round(statistics.median(speeds[name]), 2),
        **ratio(speeds[name], speeds["as it is"]),
        "turns": len(speeds[name]),
    }


def work() -> None:
    """In a process of its own: for each number of seconds on standard input, print steps per second."""
    step = make_step()
    step()
    for line in sys.stdin:
        seconds, steps, started = float(line), 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            step()
            steps += 1
        print(steps / (time.perf_counter() - started), flush=True)


def make_step() -> Any:
    """A training step of two small encoder layers with relative positions."""
    import torch

    from relpos.nn import RelativeTransformerEncoder, RelativeTransformerEncoderLayer

    torch.manual_seed(0)
    layer = RelativeTransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, max_distance=16)
    encoder = RelativeTransformerEncoder(layer, num_layers=2)
    optimizer = torch.optim.Adam(encoder.parameters())
    x = torch.randn(SEQUENCES, LENGTH, WIDTH)

    def step() -> None:
        encoder(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ask(worker: subprocess.Popen[str], seconds: float) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{seconds}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def _worker(added: dict[str, str]) -> Any:
    return _started([sys.executable, __file__, "--worker"], env=BARE | added)


@contextmanager
def _started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
