"""The CPU kernel beside torch's attention: every setting that it has a bound for, and whether it is met.

    python benchmarks/bounds.py --threads 2 --json benchmarks/results/bounds.jsonl

Prints a Markdown table. A ratio is the time of the form over the time of the other, the median over turns in
one process; unless a row says otherwise float32, 8 heads of 64, k 16. With --json a row that was measured
before, with the same kernel, commit and threads, is read and not measured again.
"""

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from forms import NUM_TENSORS, Setting
from harness import Plan, compare, find, start_record
from records import Record, append, make_parser, parse, read_or_end
from table import BOUNDS_HEAD, bounds_row

MEMORY_BOUND = 64.0  # MiB beyond inputs and outputs


class Row(NamedTuple):
    """A setting, a form, the form that it is compared with, and the highest ratio allowed.

    Args:
        bounds: of each pass that is measured; None if the ratio has no bound.
        is_memory: measure peak memory beyond inputs and outputs; the bound is in MiB.
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

    memory: dict[str, float | None] = {"forward": MEMORY_BOUND, "both": MEMORY_BOUND}
    once: dict[str, float | None] = {"forward": None}
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
        *(
            # all keys are allowed but those after a token
            Row(f"{new} new, {keys} keys, b {batch}", Setting(keys, batch, queries=new, is_causal=True), once)
            for new in (1, 4)
            for batch in (1, 8)
            for keys in (128, 1024, 8192, 65_536)
        ),
        Row("peak memory, n 32768", Setting(length=32_768), memory, is_memory=True),
    ]


ROWS = _rows()


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows that --json does not hold, print a table, and count the bounds that are met."""
    parser = make_parser(__doc__, turns=15)
    text = "rows whose name contains one of these"
    parser.add_argument("--rows", nargs="+", default=[""], help=text, metavar="TEXT")
    options = parse(parser, arguments)
    rows = [row for row in ROWS if any(text in row.name for text in options.rows)]
    if not rows:
        names = "; ".join(row.name for row in ROWS)
        parser.error(
            f"argument --rows: must be part of the name of a row; got {options.rows}. Rows: {names}."
        )
    known = read_or_end(parser, options.json)
    print(*BOUNDS_HEAD, sep="\n", flush=True)
    records = []
    for row in rows:
        for name in row.bounds:
            setting = replace(row.setting, has_backward=name == "both")
            start = start_record("bounds", setting, options.threads, row=row.name)
            sides = (row.against, row.form)
            pair = find(known, start, sides, "row")
            if len(pair) < len(sides):
                plan = Plan(options.turns, options.seconds, options.memory_limit, options.threads)
                pair = measure(row, setting, plan, start)
                for record in pair:
                    append(options.json, record)
            records.append(pair[-1])
            print(bounds_row(*pair), flush=True)
    with_bound = [x for x in records if x["bound"] is not None]
    print(f"\n{sum(bool(x['is_met']) for x in with_bound)} of {len(with_bound)} bounds are met")
    return int(any(x["is_failure"] for x in records))


def measure(row: Row, setting: Setting, plan: Plan, start: Record) -> list[Record]:
    """The records of both forms, the row's own last. Memory is beyond inputs and outputs."""
    if row.is_memory:
        plan = plan._replace(turns=0, has_memory=True)
    bound = row.bounds[start["pass"]]
    other, own = compare((row.against, row.form), setting, plan, start, against=(row.against,))
    for record in (other, own):
        if record["peak_mib"] is not None:
            record["peak_mib"] = round(record["peak_mib"] - output_mib(record["side"], setting), 2)
    value = own["peak_mib"] if row.is_memory else own["ratio_to"].get(row.against)
    is_met = None if bound is None or value is None else value <= bound
    mark = {"is_memory": row.is_memory}
    return [
        {**other, **mark, "against": None, "bound": None, "is_met": None},
        {**own, **mark, "against": row.against, "bound": bound, "is_met": is_met},
    ]


def output_mib(name: str, setting: Setting) -> float:
    """MiB of the results of one call: out and, with a backward pass, the gradients."""
    of_a_token = setting.batch * setting.heads * setting.d_k
    numbers = of_a_token * setting.num_queries
    if setting.has_backward:
        numbers += of_a_token * (setting.num_queries + 2 * setting.length)
        numbers += (NUM_TENSORS.get(name, 5) - 3) * (2 * setting.max_distance + 1) * setting.d_k
    return numbers * getattr(torch, setting.dtype).itemsize / 2**20


if __name__ == "__main__":
    sys.exit(main())
