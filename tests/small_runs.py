"""A recipe that trains in seconds, for tests of training itself, and what a run has logged."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def small_values(**training: Any) -> dict[str, Any]:
    """A recipe that trains in seconds, for tests of training itself; `training` changes that section."""
    lines = {"shortest": 1, "longest": 3, "largest": 60}
    return {
        "data": {
            "train": [{"numbers": {"lines": 400, **lines, "seed": 1}}],
            "validation": [{"numbers": {"lines": 20, **lines, "seed": 2, "part": "heldout"}}],
            "test": [{"numbers": {"lines": 20, **lines, "seed": 3, "part": "heldout"}}],
        },
        "tokenizer": {"vocabulary": 320},
        "model": {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "num_heads": 2,
            "d_ff": 32,
            "relative_max_distance": 4,
        },
        "training": {
            "updates": 8,
            "tokens_per_batch": 512,
            "warmup": 10,
            "log_every": 1,
            "evaluate_every": 4,
            "validation_pairs": 4,
            **training,
        },
    }


def read_metrics(run: Path, name: str) -> dict[int, float]:
    """Every logged value of `name` by its update."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def wait_until(is_there: Callable[[], object], process: subprocess.Popen) -> None:
    """Return once `is_there` says so, while `process` runs."""
    until = time.monotonic() + 240
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
