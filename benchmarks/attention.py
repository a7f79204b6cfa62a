"""Time and memory of attention: torch's without positions, two forms of other libraries, relpos' backends.

    python benchmarks/attention.py --lengths 64 256 1024 --pass forward both --json FILE

All forms take turns in one process, in a random order. `seconds` is one call, the median over the turns;
`ratio_to_sdpa` the median of the ratios to scaled_dot_product_attention in the same turn; `peak_mib` the most
memory that a call held at one time: inputs and masks excluded, outputs and gradients included. A pass is
"forward", or "both": forward, then the gradients of query, key, value and both tables.
"""

import argparse
import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention_forms import DTYPES, FORMS, Setting, Step, Tensors, make_step, make_tensors, prepare, why_not
from machine import commit, device_name
from peak_memory import OverLimit, limited, peak_mib

# seconds; shorter turns measure the clock and the caches that the turn before left
SHORTEST_TURN = 0.02
FEWEST_TURNS = 3
COLUMNS = "{:>9}  {:8}  {:>7}  {:>12}  {:>8}  {:>10}"


class Runner(NamedTuple):
    """A form that is ready to run, and how many calls make a turn."""

    step: Step
    repetitions: int
    turn_seconds: float


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and append a line of JSON for each row to --json."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("passes", "backends"):
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    torch.set_num_threads(options.threads)
    if options.json:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
        except OSError as error:
            parser.error(f"argument --json: {error}")
    print(COLUMNS.format("form", "pass", "length", "median", "to sdpa", "peak MiB"), flush=True)
    for length in options.lengths:
        for name in options.passes:
            for record in measure(_setting(length, name == "both", options), options):
                print(_row(record), flush=True)
                if options.json:
                    _append(options.json, record)


def measure(setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each form of options.backends, sdpa first.

    Returns:
        Dicts whose seconds, ratio_to_sdpa and peak_mib are None where `reason` says why the form did not run.
    """
    tensors = make_tensors(setting)
    names = ["sdpa", *(name for name in options.backends if name != "sdpa")]
    limit = round(options.memory_limit * 2**30)
    peaks: dict[str, float] = {}
    runners: dict[str, Runner] = {}
    reasons: dict[str, str] = {}
    for name in names:
        _say(setting, name)
        try:
            if against := why_not(name, setting, tensors):
                reasons[name] = "; ".join(against)
                continue
            if options.memory:
                peaks[name] = _peak_of(name, setting, limit, options.threads)
            with limited(limit, setting.device):
                runners[name] = _runner(name, setting, tensors)
        except (OverLimit, ChildProcessError) as error:
            reasons[name] = str(error)
        gc.collect()
    _say(setting, "all forms in turns")
    seconds = _take_turns(runners, setting.device, _num_turns(runners, options))
    common = _common(setting, options)
    return [
        {
            "backend": name,
            **common,
            **_timing(seconds.get(name), seconds.get("sdpa")),
            "peak_mib": round(peaks[name], 2) if name in runners and name in peaks else None,
            "reason": reasons.get(name),
        }
        for name in names
    ]


def _append(path: Path, record: dict[str, Any]) -> None:
    """Add the record as a line, or end with a line that says why it cannot be written."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        sys.exit(f"attention.py: error: argument --json: {path}: {error.strerror}")


def _peak_of(name: str, setting: Setting, limit: int, threads: int) -> float:
    small = replace(setting, length=min(128, setting.length))
    return peak_mib(
        partial(make_step, name, setting),
        limit=limit,
        device=setting.device,
        threads=threads,
        warm_up=partial(make_step, name, small),
    )


def _runner(name: str, setting: Setting, tensors: Tensors) -> Runner:
    step = prepare(name, setting, tensors)
    # the first call loads code, and may compile
    _turn(step, 1, setting.device)
    once = _turn(step, 1, setting.device)
    if once < SHORTEST_TURN:
        once = _turn(step, math.ceil(SHORTEST_TURN / 4 / once), setting.device)
    repetitions = max(1, math.ceil(SHORTEST_TURN / once))
    return Runner(step, repetitions, once * repetitions)


def _num_turns(runners: dict[str, Runner], options: argparse.Namespace) -> int:
    """As many as asked for, or fewer where they would take longer than --seconds."""
    one = sum(runner.turn_seconds for runner in runners.values())
    affordable = options.turns if one == 0 else int(options.seconds / one)
    return min(options.turns, max(FEWEST_TURNS, affordable))


def _take_turns(runners: dict[str, Runner], device: str, num_turns: int) -> dict[str, list[float]]:
    """Seconds of one call for each form and turn; within a turn the forms run in a random order."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(num_turns):
        for name in random.Random(turn).sample(sorted(runners), len(runners)):
            runner = runners[name]
            seconds[name].append(_turn(runner.step, runner.repetitions, device))
    return seconds


def _turn(step: Step, repetitions: int, device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(repetitions):
        step()
    wait()
    return (time.perf_counter() - started) / repetitions


def _timing(own: list[float] | None, sdpa: list[float] | None) -> dict[str, Any]:
    if own is None:
        return {"seconds": None, "ratio_to_sdpa": None, "ratio_quartiles": None, "turns": 0}
    timing: dict[str, Any] = {
        "seconds": statistics.median(own),
        "ratio_to_sdpa": None,
        "ratio_quartiles": None,
    }
    if sdpa is not None:
        ratios = [a / b for a, b in zip(own, sdpa, strict=True)]
        timing["ratio_to_sdpa"] = round(statistics.median(ratios), 3)
        low, _, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
        timing["ratio_quartiles"] = [round(low, 3), round(high, 3)]
    return {**timing, "turns": len(own)}


def _common(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """What the records of one setting share."""
    return {
        "pass": "both" if setting.has_backward else "forward",
        "dtype": setting.dtype,
        "batch": setting.batch,
        "heads": setting.heads,
        "length": setting.length,
        "d_k": setting.d_k,
        "max_distance": setting.max_distance,
        "is_causal": setting.is_causal,
        "padding": setting.padding,
        "dropout": setting.dropout,
        "device": setting.device,
        "device_name": device_name(setting.device),
        "machine": platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit(),
        "memory_limit_gib": options.memory_limit,
    }


def _setting(length: int, has_backward: bool, options: argparse.Namespace) -> Setting:
    return Setting(
        length=length,
        batch=options.batch,
        heads=options.heads,
        d_k=options.d_k,
        max_distance=options.max_distance,
        dtype=options.dtype,
        device=options.device,
        is_causal=options.causal,
        padding=options.padding,
        dropout=options.dropout,
        has_backward=has_backward,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    count, share = partial(_number, int, 1, math.inf), partial(_number, float, 0, 1)
    add("--lengths", nargs="+", type=count, default=[64, 256, 1024], help="tokens", metavar="N")
    add("--pass", nargs="+", choices=("forward", "both"), default=["forward", "both"], dest="passes")
    add("--backends", nargs="+", choices=FORMS, default=list(FORMS), help="sdpa always runs")
    add("--batch", type=count, default=1)
    add("--heads", type=count, default=8)
    add("--d-k", type=count, default=64, help="width of a head")
    add("--max-distance", type=partial(_number, int, 0, math.inf), default=16, help="k")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--causal", action="store_true", help="no query attends to a later key")
    add("--padding", type=share, default=0.0, help="share of each sequence that is padding, 0 to 1")
    add("--dropout", type=share, default=0.0, help="probability of dropping a weight, 0 to 1")
    add("--turns", type=count, default=15, help="of each form")
    add("--seconds", type=partial(_number, float, 0, math.inf), default=60.0, help="fewer turns beyond that")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--no-memory", action="store_false", dest="memory", help="time only")
    add("--memory-limit", type=_limit, default=8.0, help="GiB; skip beyond it")
    add("--json", type=Path, help="append a line for each row", metavar="FILE")
    return parser


def _number(kind: type, least: float, below: float, text: str) -> Any:
    """`text` as a number from `least` on and below `below`."""
    name = "an integer" if kind is int else "a number"
    bounds = f"of at least {least}" if below == math.inf else f"from {least} on and below {below}"
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number < below:
        raise argparse.ArgumentTypeError(f"must be {name} {bounds}; got {text!r}")
    return number


def _limit(text: str) -> float:
    """`text` as a number of GiB above 0: without memory nothing runs."""
    limit: float = _number(float, 0, math.inf, text)
    if limit == 0:
        raise argparse.ArgumentTypeError(f"must be above 0; got {text!r}")
    return limit


def _row(record: dict[str, Any]) -> str:
    start = (record["backend"], record["pass"], record["length"])
    if record["seconds"] is None:
        return COLUMNS.format(*start, "skipped:", "", "").rstrip() + f" {record['reason']}"
    ratio, peak = (record[name] for name in ("ratio_to_sdpa", "peak_mib"))
    return COLUMNS.format(
        *start,
        f"{record['seconds'] * 1e3:.3f} ms",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if peak is None else f"{peak:.1f}",
    )


def _say(setting: Setting, what: str) -> None:
    passes = "both" if setting.has_backward else "forward"
    print(f"length {setting.length}, {passes}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
