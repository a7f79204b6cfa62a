"""Attention on a GPU: torch's without positions, FlexAttention, the gather form, and relpos' backends.

    python benchmarks/gpu_attention.py --budget 240 --json FILE [--rehearse]

All sides take turns in one process, in a random order. `seconds` is what the device takes for one call, the
median over the turns; `ratio_to_flash` and `ratio_to_gather` medians of the ratios within a turn; `tflops`
counts the same operations for every side (gpu_forms.num_flop); `peak_mib` is what a call held beyond its
inputs. Each side is held against the reference before it is timed. Of 16,384 tokens, 1,024 wide, each batch
has 16 heads of 64 or 8 of 128. The cells that matter most come first, and what the budget does not reach is
named. A line is written as soon as a cell is done: the same --run goes on where it ended.

Exit status: 0; 1 where a backend of relpos failed or computed something else; 2 wrong use, or no GPU; 3 where
a side broke the device for this process, and the same --run should be started again.
"""

import argparse
import gc
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attention_forms import Setting, Step, Tensors, make_tensors
from gpu_cells import Budget, cells, label
from gpu_device import gpu_circumstances, require_gpu
from gpu_forms import SIDES, check_sample, check_small, make_step, num_flop, why_not
from gpu_timing import Clock, Taken, take_turns
from measuring import Plan, Runner, num_turns, ratio
from peak_memory import OverLimit, limited, peak_mib
from records import append, count, gibibytes, read, seconds, writable

Record = dict[str, Any]

OURS = ("merged", "triton")
COLUMNS = "{:>44}  {:10}  {:>11}  {:>8}  {:>8}  {:>10}"


class DeviceLost(Exception):  # noqa: N818
    """A side broke the device for this process; its record is written."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what this run has not measured yet, print a table, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    require_gpu(options.rehearse)
    writable(parser, options.json)
    options.turns = options.turns or (2 if options.rehearse else 20)
    try:
        records = [
            x for x in read(options.json) if x.get("what") == "attention" and x.get("run") == options.run
        ]
    except ValueError as error:
        parser.error(f"argument --json: {error}")
    start = {"what": "attention", "run": options.run, **gpu_circumstances(options.rehearse)}
    budget, clock = Budget(options.budget), Clock(start["device"])
    print(COLUMNS.format("cell", "side", "seconds", "to flash", "TFLOP/s", "peak MiB"), flush=True)
    left_out = []
    for setting in cells(options.rehearse):
        done = {x["side"] for x in records if _is_of(x, setting)}
        sides = [name for name in SIDES if name not in done]
        if not sides:
            continue
        if budget.is_spent():
            left_out.append(label(setting))
            continue
        try:
            records += measure(sides, setting, start, options, budget, clock)
        except DeviceLost as lost:
            print(f"error: {lost}. Start the same --run again.", file=sys.stderr)
            return 3
    _say_left_out(left_out, start, options)
    return int(any(x["is_failure"] and x["side"] in OURS for x in records))


def measure(
    sides: list[str],
    setting: Setting,
    start: Record,
    options: argparse.Namespace,
    budget: Budget,
    clock: Clock,
) -> list[Record]:
    """A record for each side, written as well.

    Returns:
        Dicts whose numbers are None where `reason` says why the side did not run.
    Raises:
        DeviceLost: after the record of the side that broke it is written.
    """
    tensors = make_tensors(setting)
    common = {**start, "pass": "both" if setting.has_backward else "forward", **asdict(setting)}
    runners: dict[str, Runner] = {}
    found: dict[str, Record] = {}
    for name in sides:
        print(f"{label(setting)}: {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        runner, found[name] = _prepared(name, setting, tensors, options, budget, clock)
        if runner is not None:
            runners[name] = runner
        elif found[name]["is_failure"] and _is_lost(clock):
            _write({**common, "side": name, **found[name]}, setting, options)
            raise DeviceLost(f"{name} broke the device at {label(setting)}")
        _free(clock)
        if name in budget.compiling:
            budget.compiling[name] += time.monotonic() - began
    taken, failed = _turns(runners, clock, options)
    found |= dict.fromkeys(runners, failed) if failed else {}
    records = [{**common, "side": name, **found[name], **_timing(name, taken, setting)} for name in sides]
    for record in records:
        _write(record, setting, options)
    if failed and _is_lost(clock):
        raise DeviceLost(f"the device broke in turns at {label(setting)}")
    return records


def _prepared(
    name: str,
    setting: Setting,
    tensors: Tensors,
    options: argparse.Namespace,
    budget: Budget,
    clock: Clock,
) -> tuple[Runner | None, Record]:
    """The side ready for its turns, or None, and its record without times."""
    try:
        if against := why_not(name, setting, tensors) + budget.why_not(name):
            return None, _nothing("; ".join(against))
        return _warm(name, setting, tensors, options, clock)
    except OverLimit as error:
        return None, _nothing(str(error))
    except Exception as error:
        # whatever a side raises is what is to be recorded
        return None, _nothing(_in_a_line(error), is_failure=True)


def _turns(
    runners: dict[str, Runner], clock: Clock, options: argparse.Namespace
) -> tuple[dict[str, Taken], Record | None]:
    """What the turns took, or the record of all sides where one of them failed."""
    try:
        return take_turns(runners, clock, num_turns(runners, Plan(options.turns, options.seconds))), None
    except Exception as error:
        return {}, _nothing(f"in turns with the others: {_in_a_line(error)}", is_failure=True)


def _warm(
    name: str, setting: Setting, tensors: Tensors, options: argparse.Namespace, clock: Clock
) -> tuple[Runner, Record]:
    """The side, checked, compiled and warm, and its record without times."""
    began = time.monotonic()
    limit = round(options.memory_limit * 2**30)
    if clock.is_cuda:
        limit = min(limit, torch.cuda.mem_get_info()[0])
    device = setting.device
    with limited(limit, device):
        check_small(name, setting)
        step = make_step(name, setting, tensors)
        check_sample(name, setting, tensors, step())
    peak = _peak(step, limit) if clock.is_cuda else None
    with limited(limit, device):
        turn_seconds = clock.wall_seconds(step)
    prepared = {**_nothing(None), "peak_mib": peak, "prepare_seconds": round(time.monotonic() - began, 2)}
    # a turn has two calls
    return Runner(step, 1, 2 * turn_seconds), prepared


def _peak(step: Step, limit: int) -> float:
    return round(peak_mib(lambda: step, limit=limit, device="cuda"), 2)


def _timing(name: str, taken: dict[str, Taken], setting: Setting) -> Record:
    """What is known from the turns; nothing where the side took none."""
    if name not in taken:
        return {}
    own = taken[name].device
    median = statistics.median(own)
    timing: Record = {
        "seconds": median,
        "wall_seconds": statistics.median(taken[name].wall),
        "tflops": round(num_flop(setting) / median / 1e12, 4),
        "turns": len(own),
    }
    for other, short in (("sdpa_flash", "flash"), ("gather", "gather")):
        if other in taken:
            to_other = ratio(own, taken[other].device)
            timing |= {
                f"ratio_to_{short}": to_other["ratio"],
                f"ratio_to_{short}_quartiles": to_other["ratio_quartiles"],
            }
    return timing


def _nothing(reason: str | None, *, is_failure: bool = False) -> Record:
    names = ["seconds", "wall_seconds", "ratio_to_flash", "ratio_to_flash_quartiles", "ratio_to_gather"]
    names += ["ratio_to_gather_quartiles", "tflops", "peak_mib", "prepare_seconds"]
    return {**dict.fromkeys(names), "turns": 0, "reason": reason or None, "is_failure": is_failure}


def _write(record: Record, setting: Setting, options: argparse.Namespace) -> None:
    append(options.json, record)
    start = (label(setting), record["side"])
    if record["seconds"] is None:
        print(COLUMNS.format(*start, "not run:", "", "", "").rstrip(), record["reason"], flush=True)
        return
    others = (record[name] for name in ("ratio_to_flash", "tflops", "peak_mib"))
    shown = ["-" if x is None else f"{x:.2f}" for x in others]
    print(COLUMNS.format(*start, f"{record['seconds'] * 1e3:.3f} ms", *shown), flush=True)


def _say_left_out(left_out: list[str], start: Record, options: argparse.Namespace) -> None:
    if left_out:
        append(options.json, {**start, "what": "left out", "budget": options.budget, "cells": left_out})
        print(f"The budget of {options.budget:g} s was spent before {len(left_out)} cells:")
        print(*left_out, sep="\n")


def _is_of(record: Record, setting: Setting) -> bool:
    return all(record[name] == value for name, value in asdict(setting).items())


def _is_lost(clock: Clock) -> bool:
    """Whether the device answers this process no more."""
    try:
        clock.wait()
    except RuntimeError:
        return True
    return False


def _in_a_line(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _free(clock: Clock) -> None:
    gc.collect()
    if clock.is_cuda:
        torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--json", type=Path, help="append a line for each side of a cell", metavar="FILE")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help="name of the run; default: the time")
    add("--budget", type=seconds, default=240.0, help="seconds after which no cell begins")
    add("--turns", type=count, help="of each side in a cell; default: 20, and 2 in a rehearsal")
    add("--seconds", type=seconds, default=3.0, help="of turns in a cell; fewer turns beyond that")
    add("--memory-limit", type=gibibytes, default=64.0, help="GiB for one call; skip beyond it")
    add("--rehearse", action="store_true", help="run it all in small on the CPU, and measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
