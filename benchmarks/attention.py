"""Time and memory of attention: torch's without positions, two forms of other libraries, relpos' backends.

    python benchmarks/attention.py --lengths 64 256 1024 --pass forward both --json FILE

All forms take turns in one process, in a random order. `seconds` is one call, the median over the turns;
`ratio_to_sdpa` the median of the ratios to scaled_dot_product_attention in the same turn; `peak_mib` the most
memory that a call held at one time: inputs and masks excluded, outputs and gradients included. A pass is
"forward", or "both": forward, then the gradients of query, key, value and both tables.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention_forms import DTYPES, ON_CPU, Setting, make_step, make_tensors, why_not
from measuring import Plan, ratio, time_forms
from peak_memory import OverLimit, peak_mib
from records import append, circumstances, count, gibibytes, number, seconds, share, writable

COLUMNS = "{:>9}  {:8}  {:>7}  {:>12}  {:>8}  {:>10}"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and append a line of JSON for each row to --json."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("passes", "backends"):
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device here; use --device cpu")
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    print(COLUMNS.format("form", "pass", "length", "median", "to sdpa", "peak MiB"), flush=True)
    for length in options.lengths:
        for name in options.passes:
            for record in measure(_setting(length, name == "both", options), options):
                print(_row(record), flush=True)
                append(options.json, record)


def measure(setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each form of options.backends, sdpa first.

    Returns:
        Dicts whose seconds, ratio_to_sdpa and peak_mib are None where `reason` says why the form did not run.
    """
    names = ["sdpa", *(name for name in options.backends if name != "sdpa")]
    plan = Plan(options.turns, options.seconds, round(options.memory_limit * 2**30))
    say = partial(_say, setting)
    peaks, reasons = _peaks(names, setting, plan, options, say) if options.memory else ({}, {})
    taken, others = time_forms([name for name in names if name not in reasons], setting, plan, say)
    reasons |= others
    common = _common(setting, options)
    return [
        {
            "backend": name,
            **common,
            **_timing(taken.get(name), taken.get("sdpa")),
            "peak_mib": round(peaks[name], 2) if name in taken and name in peaks else None,
            "reason": reasons.get(name),
        }
        for name in names
    ]


def _peaks(
    names: list[str],
    setting: Setting,
    plan: Plan,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> tuple[dict[str, float], dict[str, str]]:
    """Peak memory of each form in MiB, and why the others have none."""
    peaks: dict[str, float] = {}
    reasons: dict[str, str] = {}
    tensors = make_tensors(setting)
    for name in names:
        if against := why_not(name, setting, tensors):
            reasons[name] = "; ".join(against)
            continue
        say(f"memory of {name}")
        try:
            peaks[name] = _peak_of(name, setting, plan.memory_limit, options.threads)
        except (OverLimit, ChildProcessError) as error:
            reasons[name] = str(error)
    return peaks, reasons


def _peak_of(name: str, setting: Setting, limit: int, threads: int) -> float:
    small = replace(setting, length=min(128, setting.length))
    return peak_mib(
        partial(make_step, name, setting),
        limit=limit,
        device=setting.device,
        threads=threads,
        warm_up=partial(make_step, name, small),
    )


def _timing(own: list[float] | None, sdpa: list[float] | None) -> dict[str, Any]:
    if own is None:
        return {"seconds": None, "ratio_to_sdpa": None, "ratio_quartiles": None, "turns": 0}
    timing: dict[str, Any] = {
        "seconds": statistics.median(own),
        "ratio_to_sdpa": None,
        "ratio_quartiles": None,
    }
    if sdpa is not None:
        found = ratio(own, sdpa)
        timing |= {"ratio_to_sdpa": found["ratio"], "ratio_quartiles": found["ratio_quartiles"]}
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
        **circumstances(setting.device, options.threads),
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
    add("--lengths", nargs="+", type=count, default=[64, 256, 1024], help="tokens", metavar="N")
    add("--pass", nargs="+", choices=("forward", "both"), default=["forward", "both"], dest="passes")
    add("--backends", nargs="+", choices=ON_CPU, default=ON_CPU, help="sdpa always runs")
    add("--batch", type=count, default=1)
    add("--heads", type=count, default=8)
    add("--d-k", type=count, default=64, help="width of a head")
    add("--max-distance", type=partial(number, int, 0, float("inf")), default=16, help="k")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--causal", action="store_true", help="no query attends to a later key")
    add("--padding", type=share, default=0.0, help="share of each sequence that is padding, 0 to 1")
    add("--dropout", type=share, default=0.0, help="probability of dropping a weight, 0 to 1")
    add("--turns", type=count, default=15, help="of each form")
    add("--seconds", type=seconds, default=60.0, help="fewer turns beyond that")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--no-memory", action="store_false", dest="memory", help="time only")
    add("--memory-limit", type=gibibytes, default=8.0, help="GiB; skip beyond it")
    add("--json", type=Path, help="append a line for each row", metavar="FILE")
    return parser


def _row(record: dict[str, Any]) -> str:
    start = (record["backend"], record["pass"], record["length"])
    if record["seconds"] is None:
        return COLUMNS.format(*start, "skipped:", "", "").rstrip() + f" {record['reason']}"
    to_sdpa, peak = (record[name] for name in ("ratio_to_sdpa", "peak_mib"))
    return COLUMNS.format(
        *start,
        f"{record['seconds'] * 1e3:.3f} ms",
        "-" if to_sdpa is None else f"{to_sdpa:.2f}",
        "-" if peak is None else f"{peak:.1f}",
    )


def _say(setting: Setting, what: str) -> None:
    passes = "both" if setting.has_backward else "forward"
    print(f"length {setting.length}, {passes}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
