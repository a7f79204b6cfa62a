"""The records of attention.py as a picture and as a page of tables.

    python benchmarks/plot_attention.py benchmarks/results/attention.jsonl --plot docs/attention.png
        --table docs/attention.md --bounds benchmarks/results/bounds.jsonl

Of several records of the same thing the last one counts. The page has every setting, the picture the one with
the most lengths.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from bounds import section
from records import read
from relpos.inspection._style import COLOURS, INK, MARKERS, PALE, new_figure, tidy

Record = dict[str, Any]

# what two records must share to stand in one table
SETTING = (
    "device",
    "device_name",
    "threads",
    "dtype",
    "batch",
    "heads",
    "d_k",
    "max_distance",
    "is_causal",
    "padding",
    "dropout",
)
PASSES = {"forward": "forward", "both": "forward and backward"}
FORMS = {
    "sdpa": "scaled_dot_product_attention, no positions",
    "gather": "gather, [n, n, d] (tensor2tensor, OpenNMT)",
    "einsum": "einsum, [n, n, d] (Hugging Face)",
    "dense": "relpos: dense",
    "merged": "relpos: merged",
    "cpu": "relpos: cpu",
    "triton": "relpos: triton",
}
INTRODUCTION = """\
One call. In brackets the ratio to `scaled_dot_product_attention` without positions, the median over turns
that all forms took in one process. Memory is the most that a call held at one time: inputs and masks
excluded, outputs and gradients included. `gather` and `einsum` are the forms of other libraries, with a
vector for each pair of query and key.

    python benchmarks/attention.py --threads 2 --json benchmarks/results/attention.jsonl"""
UNITS = {
    "seconds": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "peak_mib": ((1024, "GiB"), (1, "MiB"), (1 / 1024, "KiB")),
}


def main(arguments: list[str] | None = None) -> None:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("records", type=Path, help="JSON lines that attention.py wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    parser.add_argument("--bounds", type=Path, metavar="FILE", help="JSON lines of bounds.py, for the table")
    options = parser.parse_args(arguments)
    if not (options.plot or options.table):
        parser.error("give --plot, --table or both")
    try:
        settings = group(options.records.read_text().splitlines())
        for path in filter(None, (options.plot, options.table)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if options.plot:
            draw(max(settings, key=_num_lengths)).savefig(options.plot)
        if options.table:
            bounds = read(options.bounds) if options.bounds else []
            options.table.write_text(page(settings, options.table, options.plot, bounds))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def group(lines: Iterable[str]) -> list[list[Record]]:
    """The records of each setting, in the order in which the settings first appear.

    Raises:
        ValueError: a line is no record of attention.py, or there is none.
    """
    latest: dict[tuple, dict[tuple, Record]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            setting = tuple(record[name] for name in SETTING)
            key = tuple(record[name] for name in ("pass", "length", "backend"))
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(
                f"line {number} of the records must be one of attention.py; got {line[:40]!r}"
            ) from None
        latest.setdefault(setting, {})[key] = record
    if not latest:
        raise ValueError("records must have at least one line; got none. Run attention.py with --json.")
    return [list(records.values()) for records in latest.values()]


def draw(records: list[Record]) -> Figure:
    """Time and memory against length, both axes logarithmic, a column for each pass."""
    passes = [name for name in PASSES if any(x["pass"] == name for x in records)]
    has_memory = any(x["peak_mib"] is not None for x in records)
    fields = {
        "seconds": "time of one call",
        **({"peak_mib": "peak memory beyond inputs"} if has_memory else {}),
    }
    figure = new_figure(1.6 + 3.2 * len(fields))
    grid = figure.subplots(len(fields), len(passes), sharex=True, sharey="row", squeeze=False)
    for row, (field, title) in zip(grid, fields.items(), strict=True):
        for axes, name in zip(row, passes, strict=True):
            _draw_lines(axes, [x for x in records if x["pass"] == name], field)
            axes.set_title(f"{title}, {PASSES[name]}", fontsize=11, color=INK, loc="left")
    lengths = sorted({x["length"] for x in records})
    for axes in grid[-1]:
        # the panels share their ticks
        axes.set_xticks(lengths, _apart(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("length, tokens", fontsize=10, color=INK)
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    shown = [FORMS.get(name, name) for name in _forms(records)]
    figure.legend(
        [lines[label] for label in shown if label in lines],
        [label for label in shown if label in lines],
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=10,
        handlelength=3.5,
    )
    figure.supxlabel(_caption(records), fontsize=9, color="#555555")
    return figure


def _draw_lines(axes: Axes, records: list[Record], field: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name in _forms(records):
        index = list(FORMS).index(name) if name in FORMS else len(FORMS)
        points = sorted((x["length"], x[field]) for x in records if x["backend"] == name and x[field])
        if not points:
            continue
        is_ours = index >= 3
        axes.plot(
            *zip(*points, strict=True),
            label=FORMS.get(name, name),
            color=(*COLOURS[-1:], *COLOURS[:-1])[index % len(COLOURS)],
            linestyle="-" if is_ours else "--",
            linewidth=2 if is_ours else 1.5,
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            markerfacecolor=None if is_ours else "none",
        )
    tidy(axes)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, field)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _apart(lengths: list[int]) -> list[str]:
    """The lengths as labels of an axis, without those that would touch the next."""
    # eight fit; a little less, because powers are rounded
    least = 0.999 * max(lengths[-1] / lengths[0], 2) ** (1 / 7)
    labels: list[str] = []
    above = math.inf
    for length in reversed(lengths):
        is_shown = above / length >= least
        labels.append(f"{length:,}" if is_shown else "")
        above = length if is_shown else above
    return labels[::-1]


def _tick(value: float, field: str) -> str:
    # powers of ten have many digits in units that are powers of two
    return f"{value:,g} MiB" if field == "peak_mib" else with_unit(value, field)


def _caption(records: list[Record]) -> str:
    """The setting, and why lines end before others."""
    reasons = dict.fromkeys(x["reason"] for x in records if str(x["reason"]).startswith("needs more"))
    return "\n".join([sentence(records), *(f"A line ends where one call {reason}." for reason in reasons)])


def page(settings: list[list[Record]], path: Path, plot: Path | None, bounds: list[Record]) -> str:
    """The Markdown page that stands at `path`, with the picture and the bounds where there are any."""
    parts = [
        "# Time and memory of attention",
        INTRODUCTION,
    ]
    if plot is not None:
        parts.append(
            f"![Time and memory against length]({Path(os.path.relpath(plot, path.parent)).as_posix()})"
        )
    if bounds:
        parts += [section(bounds), _measured_with(bounds)]
    for records in settings:
        parts.append(f"## {sentence(records)}")
        for name, title in PASSES.items():
            chosen = [x for x in records if x["pass"] == name]
            if not chosen:
                continue
            parts += [f"### Time, {title}", _table(chosen, _time_cell)]
            if any(x["peak_mib"] is not None for x in chosen):
                parts += [f"### Peak memory, {title}", _table(chosen, _memory_cell)]
        parts += _notes(records)
    return "\n\n".join(parts) + "\n"


def _table(records: list[Record], cell: Callable[[Record | None], str]) -> str:
    forms = _forms(records)
    found = {(x["length"], x["backend"]): x for x in records}
    rows = [
        [f"{length:,}", *(cell(found.get((length, name))) for name in forms)]
        for length in sorted({x["length"] for x in records})
    ]
    lines = [["length", *forms], ["--:"] * (len(forms) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time_cell(record: Record | None) -> str:
    if record is None or record["seconds"] is None:
        return "-"
    ratio = record["ratio_to_sdpa"]
    ratio = "" if ratio is None or record["backend"] == "sdpa" else f" ({ratio:.2f})"
    return with_unit(record["seconds"], "seconds") + ratio


def _memory_cell(record: Record | None) -> str:
    return "-" if record is None or record["peak_mib"] is None else with_unit(record["peak_mib"], "peak_mib")


def _notes(records: list[Record]) -> list[str]:
    """Why cells are empty, and what was measured with."""
    skipped: dict[tuple[str, str, str], list[str]] = {}
    for x in sorted(records, key=lambda x: (list(PASSES).index(x["pass"]), x["length"])):
        if x["reason"]:
            skipped.setdefault((x["backend"], x["pass"], x["reason"]), []).append(f"{x['length']:,}")
    notes = [
        f"- {name}, {PASSES[which]}, at {', '.join(lengths)}: {reason}"
        for (name, which, reason), lengths in skipped.items()
    ]
    return [*(["\n".join(["Not run:", "", *notes])] if notes else []), _measured_with(records)]


def _measured_with(records: list[Record]) -> str:
    versions = ", ".join(dict.fromkeys(x["torch"] for x in records))
    commits = ", ".join(dict.fromkeys(x["commit"] for x in records))
    kernels = ", ".join(dict.fromkeys(x["kernel"] for x in records if x.get("kernel")))
    return f"torch {versions}; commit {commits}{f'; kernel {kernels}' if kernels else ''}."


def sentence(records: list[Record]) -> str:
    """The setting in words, without lengths and pass."""
    x = records[0]
    parts = [
        x["device_name"],
        *([] if x["device"] == "cuda" else [_counted(x["threads"], "thread")]),
        x["dtype"],
        f"batch {x['batch']}",
        f"{_counted(x['heads'], 'head')} of {x['d_k']}",
        f"k = {x['max_distance']}",
        *(["causal"] if x["is_causal"] else []),
        *([f"{x['padding']:.0%} padding"] if x["padding"] else []),
        *([f"dropout {x['dropout']:g}"] if x["dropout"] else []),
    ]
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def with_unit(value: float, field: str) -> str:
    """Seconds or MiB in the unit in which they are short, to three digits."""
    scale, unit = next((pair for pair in UNITS[field] if value >= pair[0]), UNITS[field][-1])
    number = value / scale
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _forms(records: Iterable[Record]) -> list[str]:
    """The names of the forms, the known ones in their order."""
    names = list(dict.fromkeys(x["backend"] for x in records))
    return [name for name in FORMS if name in names] + [name for name in names if name not in FORMS]


def _num_lengths(records: list[Record]) -> int:
    return len({x["length"] for x in records})


if __name__ == "__main__":
    main()
