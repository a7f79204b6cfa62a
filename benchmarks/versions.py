"""Training and decoding of the translator in another checkout and in this one, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before --threads 2 --json benchmarks/results/versions.jsonl

Each checkout runs in a process of its own, which answers with the processor time of a task: a training step,
or the translation of a batch by greedy or beam search. A kernel is used where the checkout has one built.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from machine import circumstances
from records import EMPTY, Record, append, count, make_parser, parse
from table import head, show

ROOT = Path(__file__).parents[1]
TASKS = ("train", "greedy", "beam 4", "one sentence")
COLUMNS = ("task", "side")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a row for each side of each task, and append them to --json."""
    parser = make_parser(__doc__, turns=15, seconds=900.0)
    add = parser.add_argument
    add("before", type=Path, help="folder of the other checkout")
    for name, size in (("d_model", 256), ("layers", 3), ("heads", 4), ("d_ff", 1024), ("vocabulary", 8000)):
        add(f"--{name.replace('_', '-')}", type=count, default=size)
    add("--batch", type=count, default=64, help="pairs of 20 tokens; searches take half of them")
    options = parse(parser, arguments)
    if not (options.before / "src" / "relpos").is_dir():
        parser.error(f"argument before: {options.before}: no checkout of relpos")
    sizes = {x: getattr(options, x) for x in ("d_model", "layers", "heads", "d_ff", "vocabulary", "batch")}
    sides = {"before": options.before.resolve(), "after": ROOT}
    workers = {side: start(folder, sizes, options.threads) for side, folder in sides.items()}
    print(*head(COLUMNS), sep="\n", flush=True)
    for task in TASKS:
        for record in measure(task, workers, options.turns):
            record = {"what": "versions", **sizes, **record, **circumstances("cpu", options.threads)}
            append(options.json, record)
            print(show(record, COLUMNS), flush=True)
    for worker in workers.values():
        worker.communicate()


def start(folder: Path, sizes: dict[str, int], threads: int) -> subprocess.Popen[str]:
    """A process that imports relpos from the checkout."""
    command = [sys.executable, __file__, "worker", *map(str, [threads, *sizes.values()])]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": str(threads)}
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert worker.stdout is not None
    if not worker.stdout.readline():
        sys.exit(f"error: {folder}: its translator cannot be imported and run")
    return worker


def measure(task: str, workers: dict[str, subprocess.Popen[str]], turns: int) -> list[Record]:
    """A record for each side; within a turn each goes first in every other turn."""
    taken: dict[str, list[float]] = {side: [] for side in workers}
    for turn in range(turns + 1):
        for side in list(workers)[:: 1 if turn % 2 else -1]:
            stdin, stdout = workers[side].stdin, workers[side].stdout
            assert stdin is not None
            assert stdout is not None
            print(task, file=stdin, flush=True)
            taken[side].append(float(stdout.readline()))
    # the first turn warms up
    taken = {side: seconds[1:] for side, seconds in taken.items()}
    records = []
    for side, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["before"], strict=True))
        middle = statistics.median(seconds)
        found = {"seconds": middle, "ratio_to": {"before": ratio}, "turns": turns}
        records.append({"task": task, "side": side, **EMPTY, **found})
    return records


def work(threads: int, d_model: int, layers: int, heads: int, d_ff: int, vocabulary: int, batch: int) -> None:
    """Answer each line of standard input, the name of a task, with its processor time in seconds."""
    from transformers.utils import logging

    from relpos.translation.config import RelposConfig
    from relpos.translation.model import RelposForConditionalGeneration

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": d_model, "num_heads": heads, "d_ff": d_ff, "vocab_size": vocabulary}
    sizes |= {"encoder_layers": layers, "decoder_layers": layers, "relative_max_distance": 16}
    model = RelposForConditionalGeneration(RelposConfig(**sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    source, target = torch.randint(3, vocabulary, (2, batch, 20))
    mask = torch.ones_like(source)
    mask[::2, 15:] = 0

    def train() -> None:
        model.train()(source, mask, labels=target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.inference_mode()
    def search(rows: int, **settings: Any) -> None:
        length = {"max_new_tokens": 20, "min_new_tokens": 20}
        model.eval().generate(source[:rows], attention_mask=mask[:rows], **length, **settings)

    half = max(1, batch // 2)
    tasks: dict[str, Callable[[], None]] = {
        "train": train,
        "greedy": lambda: search(half, num_beams=1),
        "beam 4": lambda: search(half, num_beams=4, early_stopping=False),
        "one sentence": lambda: search(1, num_beams=1),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.process_time()
        tasks[line.strip()]()
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(*map(int, sys.argv[2:]))
    else:
        main()
