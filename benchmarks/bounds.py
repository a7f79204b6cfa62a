"""The CPU kernel beside torch's attention: every row that it has a bound for, and whether it is met.

    python benchmarks/bounds.py --threads 2 --json benchmarks/results/bounds.jsonl

Prints a Markdown table. A ratio is time of the form over time of what it is held against, the median over
turns in one process; unless a row says otherwise float32, 8 heads of 64, k 16. With --json a row that was
measured before, by the same kernel, commit and threads, is read and not measured again.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention_forms import Setting, make_step
from measuring import Plan, ratio, time_forms
from peak_memory import OverLimit, peak_mib
from records import append, circumstances, count, gibibytes, read, seconds, writable

PASSES = ("forward", "both")
COLUMNS = ("row", "pass", "form", "against", "its own", "the other's", "ratio", "bound", "met")
# what a record must share with a row to stand for it, beside the setting
SAME = ("row", "pass", "form", "against", "threads", "device_name", "torch", "commit", "kernel")
SAME += tuple(asdict(Setting(length=1)))
SECTION = """\
## The CPU kernel and its bounds

Each row holds one form against another, as the median over turns in one process; where nothing else is said
in float32 with 8 heads of 64 and k = 16. `sdpa` is `scaled_dot_product_attention` without positions: for
padding with a bool mask [batch, 1, 1, key], for several new tokens with the mask that hides the keys after
each. Memory is what a call held beyond its inputs and outputs, the gradients among them.

    python benchmarks/bounds.py --threads 2 --json benchmarks/results/bounds.jsonl

A run that ended early goes on where it stopped. `benchmarks/crossover.py` measures all backends over a grid,
and `benchmarks/translator_step.py` a training step."""
MEMORY_BOUND = 64.0  # MiB beyond inputs and outputs


class Row(NamedTuple):
    """One setting, a form, what it is held against, and the highest ratio allowed.

    Args:
        bounds: of each pass that is measured; None where the ratio is reported only.
        is_memory: whether peak memory beyond inputs and outputs is measured, and the bound is in MiB.
    """

    name: str
    setting: Setting
    bounds: dict[str, float | None]
    form: str = "cpu"
    against: str = "sdpa"
    is_memory: bool = False


def _rows() -> list[Row]:
    """Every row, in the order in which they are measured."""

    def row(
        name: str, forward: float | None, both: float | None, against: str = "sdpa", **setting: Any
    ) -> Row:
        return Row(name, Setting(**setting), {"forward": forward, "both": both}, against=against)

    return [
        row("n 32, b 64", 0.9, 1.0, length=32, batch=64),
        row("n 64, b 32", 0.9, 1.0, length=64, batch=32),
        row("n 256, b 8", 0.6, 0.8, length=256, batch=8),
        row("n 1024", 0.6, 0.8, length=1024),
        row("n 2048", 0.6, 0.8, length=2048),
        row("n 4096", 0.6, 0.8, length=4096),
        row("causal, n 1024", 0.7, 0.9, length=1024, is_causal=True),
        row("half padding, n 512, b 8", 0.4, 0.5, length=512, batch=8, padding=0.5),
        row("half padding by a mask", None, None, length=512, batch=8, padding=0.5, is_masked=True),
        row("dropout 0.1, n 256, b 8", 0.4, 0.5, length=256, batch=8, dropout=0.1),
        row("bfloat16, n 1024", 0.8, 1.0, length=1024, dtype="bfloat16"),
        row("float16, n 1024", None, None, length=1024, dtype="float16"),
        row("k 64, n 1024", None, None, length=1024, max_distance=64),
        row("k 256, n 1024", None, None, length=1024, max_distance=256),
        row("n 1024, the gather form", 0.1, 0.1, "gather", length=1024),
        row("labels, n 1024", None, None, length=1024, is_labelled=True),
        row("labels, n 1024, dense", None, None, "dense", length=1024, is_labelled=True),
        *_decoding(),
        Row(
            "peak memory, n 32768",
            Setting(length=32_768),
            dict.fromkeys(PASSES, MEMORY_BOUND),
            is_memory=True,
        ),
    ]


def _decoding() -> list[Row]:
    """One or a few new tokens against a cache; all keys are allowed but those after a token."""
    return [
        Row(
            f"{queries} new, {keys} keys, b {batch}",
            Setting(length=keys, queries=queries, batch=batch, is_causal=True),
            {"forward": None},
        )
        for queries in (1, 4)
        for batch in (1, 8)
        for keys in (128, 1024, 8192, 65_536)
    ]


ROWS = _rows()


def main(arguments: list[str] | None = None) -> None:
    """Measure what --json does not hold, print a table, and count the bounds that are met."""
    parser = _parser()
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if any(text in row.name for text in options.rows)]
    if not rows:
        names = "; ".join(row.name for row in ROWS)
        parser.error(
            f"argument --rows: must be part of the name of a row; got {options.rows}. Rows: {names}."
        )
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    try:
        # what did not run may run now
        records = [x for x in read(options.json) if "row" in x and not x.get("reason")]
    except ValueError as error:
        parser.error(f"argument --json: {error}")
    done = {_identity(record): record for record in records}
    print(*HEAD, sep="\n", flush=True)
    records = []
    for row in rows:
        for name in row.bounds:
            start = {"row": row.name, "pass": name, "form": row.form, "against": row.against}
            setting = replace(row.setting, has_backward=name == "both")
            start |= asdict(setting) | circumstances("cpu", options.threads)
            record = done.get(_identity(start))
            if record is None:
                record = start | measure(row, setting, options)
                append(options.json, record)
            records.append(record)
            print(_line(_cells(record)), flush=True)
    with_bound = [record for record in records if record["bound"] is not None]
    print(f"\n{sum(bool(x['is_met']) for x in with_bound)} of {len(with_bound)} bounds are met")


def measure(row: Row, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """What one pass took, and whether its bound is met. What has a reason was not measured."""
    name = "both" if setting.has_backward else "forward"
    plan = Plan(options.turns, options.seconds, round(options.memory_limit * 2**30))

    def say(what: str) -> None:
        print(f"{row.name}, {name}: {what}", file=sys.stderr, flush=True)

    found = (_memory if row.is_memory else _time)(row, setting, plan, options.threads, say)
    bound = row.bounds[name]
    value = found["own"] if row.is_memory else found["ratio"]
    return {
        "unit": "MiB" if row.is_memory else "seconds",
        "bound": bound,
        **found,
        "is_met": None if bound is None or value is None else value <= bound,
    }


def section(records: Iterable[dict[str, Any]]) -> str:
    """A section of a Markdown page; of several records of the same row and pass the last one counts."""
    latest = {tuple(x[name] for name in SAME[:4]): x for x in records}
    lines = [*HEAD, *(_line(_cells(record)) for record in latest.values())]
    return "\n".join([SECTION, "", *lines])


def _time(row: Row, setting: Setting, plan: Plan, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    taken, reasons = time_forms((row.against, row.form), setting, plan, say)
    if reasons:
        return _nothing("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    own, other = taken[row.form], taken[row.against]
    return {
        "own": statistics.median(own),
        "other": statistics.median(other),
        **ratio(own, other),
        "turns": len(own),
        "reason": None,
    }


def _memory(
    row: Row, setting: Setting, plan: Plan, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """MiB beyond inputs and outputs, which are the gradients too where there are any."""
    peaks = []
    for name in (row.form, row.against):
        say(name)
        small = partial(make_step, name, replace(setting, length=128))
        try:
            step = partial(make_step, name, setting)
            peak = peak_mib(step, limit=plan.memory_limit, threads=threads, warm_up=small)
        except (OverLimit, ChildProcessError, NotImplementedError) as error:
            return _nothing(f"{name}: {error}")
        peaks.append(peak - output_mib(name, setting))
    own, other = (round(peak, 2) for peak in peaks)
    return {"own": own, "other": other, "ratio": None, "ratio_quartiles": None, "turns": 1, "reason": None}


def _nothing(reason: str) -> dict[str, Any]:
    names = ("own", "other", "ratio", "ratio_quartiles")
    return {**dict.fromkeys(names), "turns": 0, "reason": reason}


def output_mib(name: str, setting: Setting) -> float:
    """MiB of what one call returns: out, and with a backward pass the gradients of what the form is given."""
    num_bytes = getattr(torch, setting.dtype).itemsize
    of_a_token = setting.batch * setting.heads * setting.d_k
    numbers = of_a_token * setting.num_queries
    if setting.has_backward:
        numbers += of_a_token * (setting.num_queries + 2 * setting.length)
        numbers += 0 if name == "sdpa" else 2 * (2 * setting.max_distance + 1) * setting.d_k
    return numbers * num_bytes / 2**20


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


HEAD = (_line(COLUMNS), _line(["---"] * 4 + ["--:"] * 4 + ["---"]))


def _identity(record: dict[str, Any]) -> tuple:
    return tuple(record.get(name) for name in SAME)


def _cells(record: dict[str, Any]) -> list[str]:
    start = [record[name] for name in ("row", "pass", "form", "against")]
    if record["reason"]:
        return [*start, *["-"] * 4, record["reason"]]
    is_memory = record["unit"] == "MiB"
    values = [f"{x:.1f} MiB" if is_memory else f"{x * 1e3:.3f} ms" for x in (record["own"], record["other"])]
    found = "-" if is_memory else f"{record['ratio']:.2f}"
    if record["bound"] is None:
        return [*start, *values, found, "-", "-"]
    bound = f"{record['bound']:g} MiB" if is_memory else f"{record['bound']:.2f}"
    return [*start, *values, found, bound, "yes" if record["is_met"] else "no"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=[""], help="those whose name has one of these in it", metavar="TEXT")
    add("--turns", type=count, default=15, help="of each form")
    add("--seconds", type=seconds, default=60.0, help="fewer turns beyond that, for each row and pass")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--memory-limit", type=gibibytes, default=8.0, help="GiB; skip beyond it")
    add("--json", type=Path, help="append a line for each row; go on where it ends", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
