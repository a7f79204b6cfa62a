"""The records of a run of gpu_check.sh as a page: the aims, the suite, times, TFLOP/s and memory.

    python benchmarks/gpu_table.py benchmarks/results/gpu-h200.jsonl [--table FILE.md]

Only the last run in the file counts. An aim is met where every cell that it names was measured and holds and
the conformance suite passed, missed where one cell does not hold, and otherwise not measured. Where all hold
and the suite did not pass or finish, it is measured, and that is said beside the figure. A rehearsal measures
nothing.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_cells import LENGTHS, TABLES
from gpu_forms import SIDES
from records import read

Record = dict[str, Any]
Cell = Callable[[Record], str]

PASSES = {"forward": "forward", "both": "forward and backward"}
SIDE_NAMES = {
    "sdpa_flash": "SDPA, flash",
    "sdpa_cudnn": "SDPA, cuDNN",
    "flex": "FlexAttention, keys only",
    "gather": "gather, [n, n, d]",
    "merged": "relpos: merged",
    "triton": "relpos: triton",
}
REHEARSAL = "REHEARSAL on a CPU, nothing here is a measurement: "
# of the GPUs that the aims are about
CAPABILITY = "9.0"
# what a record must have to belong to an aim
AIMED = {"dtype": "bfloat16", "d_k": 64, "max_distance": 16, "side": "triton"}
MOST_CELLS = 4
FLOAT64 = """\
In float64 `merged` has no fused kernel on CUDA, and skips those cases: its proof is the cases of lower
precision."""
LONG = tuple(sorted(length for length in LENGTHS if length >= 2048))
INTRODUCTION = """\
One call on {device}, {dtype}, {tokens:,} tokens in a batch, {heads}. "device" is
what the device takes with cold caches, the median over turns that all sides took in one process; in brackets
the ratio to torch's flash kernel, which knows no positions. "until it is there" is what a program sees that
waits for the result of one call: launching the kernels counts as well. FlexAttention holds the keys' table
alone, so it does less than the sides beside it. TFLOP/s count the operations of plain attention for every
side. Memory is what a call held beyond its inputs, outputs and gradients included.

    benchmarks/gpu_check.sh"""


class Aim(NamedTuple):
    """The highest that a field of the records of some passes and lengths may be.

    Args:
        is_spread: whether the bound is for the largest over the smallest among the cells of a pass.
    """

    name: str
    field: str
    bound: float
    passes: tuple[str, ...]
    lengths: tuple[int, ...]
    is_spread: bool = False


AIMS = (
    Aim("forward, at most 1.10 times flash from n 2,048 on", "ratio_to_flash", 1.10, ("forward",), LONG),
    Aim("both, at most 1.25 times flash from n 2,048 on", "ratio_to_flash", 1.25, ("both",), LONG),
    Aim("at most an eighth of gather's time at n 4,096", "ratio_to_gather", 1 / 8, tuple(PASSES), (4096,)),
    # the tokens in a batch are constant, and so is memory that is linear in them
    Aim(
        "memory linear: the same from n 2,048 to 16,384, within a quarter",
        "peak_mib",
        1.25,
        tuple(PASSES),
        LONG,
        is_spread=True,
    ),
)


class Verdict(NamedTuple):
    """Whether an aim is met, and the numbers that say so."""

    aim: Aim
    is_causal: bool
    word: str  # met, missed, not measured; or measured, and what became of the suite
    why: str


def main(arguments: list[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("records", type=Path, help="JSON lines that gpu_check.sh wrote")
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    options = parser.parse_args(arguments)
    try:
        text = page(last_run(options.records))
        if options.table:
            options.table.write_text(text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(text, end="")


def last_run(path: Path) -> list[Record]:
    """The records of the last run in the file.

    Raises:
        ValueError: there is none, or a line is no record of gpu_check.sh.
    """
    records = read(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not {"what", "run", "rehearsal"} <= record.keys():
            raise ValueError(f"line {number} of {path} must be a record of gpu_check.sh. Remove it.")
    if not records:
        raise ValueError(f"{path} must have a record; got none. Run benchmarks/gpu_check.sh.")
    return [x for x in records if x["run"] == records[-1]["run"]]


def verdicts(records: list[Record]) -> list[Verdict]:
    """Each aim, with and without a causal mask."""
    doubt, suite = _doubt(records), _suite_doubt(records)
    aimed = [x for x in _measurements(records) if all(x[name] == value for name, value in AIMED.items())]
    return [
        _judge(aim, [x for x in aimed if x["is_causal"] == is_causal], is_causal, doubt, suite)
        for aim in AIMS
        for is_causal in (False, True)
    ]


def page(records: list[Record]) -> str:
    """Everything as Markdown."""
    first, measured = records[0], _measurements(records)
    mark = REHEARSAL if first["rehearsal"] else ""
    parts = [f"# {mark}Attention on a GPU", *([_introduction(measured)] if measured else [])]
    parts += ["## Aims, for an H100 or H200, bfloat16, d 64, k 16", _aims_table(records)]
    suites = [_suite(x) for x in records if x["what"] == "conformance"]
    parts += [f"Conformance: {suite}" for suite in suites or ["NOT PASSED, it did not run."]]
    parts += [] if first["rehearsal"] else [FLOAT64]
    for d_k, max_distance in _tables_of(measured):
        some = [x for x in measured if (x["d_k"], x["max_distance"]) == (d_k, max_distance)]
        for is_causal in (False, True):
            for name, title in PASSES.items():
                chosen = [x for x in some if (x["is_causal"], x["pass"]) == (is_causal, name)]
                if chosen:
                    causal = ", causal" if is_causal else ""
                    parts.append(f"## {mark}d {d_k}, k {max_distance}{causal}, {title}")
                    parts += _tables(chosen)
    parts += [*_not_run(measured), *_left_out(records), measured_with(first)]
    return "\n\n".join(parts) + "\n"


def measured_with(record: Record) -> str:
    """Versions, the commit and the run."""
    names = ("torch", "cuda", "triton", "driver", "capability", "commit", "run")
    return "; ".join(f"{name} {record[name]}" for name in names if record[name]) + "."


def _measurements(records: Iterable[Record]) -> list[Record]:
    return [x for x in records if x["what"] == "attention"]


def _doubt(records: list[Record]) -> str | None:
    """Why nothing in this run is a measurement for an aim; None where it can be."""
    x = records[0]
    if x["rehearsal"]:
        return "a rehearsal measures nothing"
    if x["capability"] != CAPABILITY:
        return f"{x['device_name']} has capability {x['capability']}, and the aims are for {CAPABILITY}"
    return None


def _suite_doubt(records: list[Record]) -> tuple[str, str] | None:
    """What became of the suite, and its counts so far, where no aim can be met; None where it passed."""
    suites = [x for x in records if x["what"] == "conformance"]
    if any(x["is_passed"] for x in suites):
        return None
    if not suites or not suites[-1]["counts"]:
        return "conformance not run", "no case ran"
    has_failed = any(x["failed"] for x in suites[-1]["counts"].values())
    word = "passed" if has_failed or suites[-1]["is_finished"] else "finished"
    return f"conformance not {word}", _counts(suites[-1])


def _judge(
    aim: Aim, aimed: list[Record], is_causal: bool, doubt: str | None, suite: tuple[str, str] | None
) -> Verdict:
    cells = [(name, length) for name in aim.passes for length in aim.lengths]
    values = {(x["pass"], x["length"]): x[aim.field] for x in aimed if x[aim.field] is not None}
    found = {cell: values[cell] for cell in cells if cell in values}
    if doubt is not None:
        return Verdict(aim, is_causal, "not measured", doubt)
    if not found:
        return Verdict(aim, is_causal, "not measured", f"0 of {len(cells)} cells")
    worst = _worst(aim, found)
    if worst > aim.bound:
        return Verdict(aim, is_causal, "missed", f"{worst:.3f}, above {aim.bound:g}")
    if len(found) < len(cells):
        why = f"{len(found)} of {len(cells)} cells, the highest {worst:.3f}"
        return Verdict(aim, is_causal, "not measured", why)
    why = f"{worst:.3f}, not above {aim.bound:g}"
    if suite is not None:
        return Verdict(aim, is_causal, f"measured, {suite[0]}", f"{why}; {suite[1]}")
    return Verdict(aim, is_causal, "met", why)


def _worst(aim: Aim, found: dict[tuple[str, int], float]) -> float:
    """The highest number of all cells, or of one pass over the lowest of that pass."""
    if not aim.is_spread:
        return max(found.values())
    passes = {name: [x for (of, _), x in found.items() if of == name] for name in aim.passes}
    return max(max(x) / max(min(x), 1e-9) for x in passes.values() if x)


def _introduction(measured: list[Record]) -> str:
    x = measured[0]
    heads = dict.fromkeys(f"{y['heads']} heads of {y['d_k']}" for y in measured)
    return INTRODUCTION.format(
        device=x["device_name"],
        dtype=x["dtype"],
        tokens=max(y["batch"] * y["length"] for y in measured),
        heads=" or ".join(heads),
    )


def _aims_table(records: list[Record]) -> str:
    rows = [[x.aim.name, "causal" if x.is_causal else "two-sided", x.word, x.why] for x in verdicts(records)]
    return _table(["aim", "mask", "verdict", "why"], rows)


def _suite(record: Record) -> str:
    verdict = "passed" if record["is_passed"] else f"NOT PASSED, {record['reason']}"
    return f"{verdict}; {_counts(record)}."


def _counts(record: Record) -> str:
    """What the cases of each backend came to, in words."""
    counts = [
        f"{name} {', '.join(f'{number} {word}' for word, number in of_backend.items())}"
        for name, of_backend in record["counts"].items()
    ]
    return "; ".join(counts) or "no case ran"


def _tables_of(measured: list[Record]) -> list[tuple[int, int]]:
    found = list(dict.fromkeys((x["d_k"], x["max_distance"]) for x in measured))
    return sorted(found, key=lambda pair: TABLES.index(pair) if pair in TABLES else len(TABLES))


def _tables(records: list[Record]) -> list[str]:
    """Times, by the device and by the host; TFLOP/s; memory where it is known."""
    parts = [
        _by_length(records, "device, ms", _time_cell),
        _by_length(records, "until it is there, ms", _wall_cell),
        _by_length(records, "TFLOP/s", _flop_cell),
    ]
    if any(x["peak_mib"] is not None for x in records):
        parts.append(_by_length(records, "memory, MiB", _memory_cell))
    return parts


def _by_length(records: list[Record], title: str, cell: Cell) -> str:
    """A row for each length, a column for each side."""
    found = {(x["length"], x["side"]): x for x in records if x["seconds"] is not None}
    rows = []
    for length in sorted({x["length"] for x in records}):
        row = [found.get((length, name)) for name in SIDES]
        rows.append([f"{length:,}", *("-" if x is None else cell(x) for x in row)])
    return _table([f"n: {title}", *(SIDE_NAMES[name] for name in SIDES)], rows, is_numbers=True)


def _time_cell(record: Record) -> str:
    ratio = record["ratio_to_flash"]
    is_plain = ratio is None or record["side"] == "sdpa_flash"
    return f"{record['seconds'] * 1e3:.3f}" + ("" if is_plain else f" ({ratio:.2f})")


def _wall_cell(record: Record) -> str:
    return f"{record['wall_seconds'] * 1e3:.3f}"


def _flop_cell(record: Record) -> str:
    return f"{record['tflops']:.0f}" if record["tflops"] >= 1 else f"{record['tflops']:.2g}"


def _memory_cell(record: Record) -> str:
    return "-" if record["peak_mib"] is None else f"{record['peak_mib']:,.0f}"


def _not_run(measured: list[Record]) -> list[str]:
    """Why cells are empty: each reason once, with where it applies."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in measured:
        if x["reason"]:
            causal = "causal, " if x["is_causal"] else ""
            cell = f"d {x['d_k']}, k {x['max_distance']}, n {x['length']:,}, {causal}{x['pass']}"
            reasons.setdefault((x["side"], x["reason"]), []).append(cell)
    lines = [f"- {SIDE_NAMES[side]}, {_some(cells)}: {reason}" for (side, reason), cells in reasons.items()]
    return ["## Not run", "\n".join(lines)] if lines else []


def _some(cells: list[str]) -> str:
    shown = "; ".join(cells[:MOST_CELLS])
    return shown if len(cells) <= MOST_CELLS else f"{shown} and {len(cells) - MOST_CELLS} more cells"


def _left_out(records: list[Record]) -> list[str]:
    """The cells that the budget did not reach."""
    return [
        f"Left out, because the budget of {x['budget']:g} s was spent: {'; '.join(x['cells'])}."
        for x in records
        if x["what"] == "left out"
    ]


def _table(head: list[str], rows: list[list[str]], *, is_numbers: bool = False) -> str:
    lines = [head, ["--:" if is_numbers else "---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
