"""Records of attention as a picture, for a CPU or a GPU: time against length, and memory.

    python benchmarks/plot.py benchmarks/results/attention.jsonl --out docs/attention.png
    python benchmarks/plot.py benchmarks/results/gpu-h200.jsonl --out FILE.png

Of several settings the one with the most lengths is drawn. On a GPU time is shown as its ratio to that of
flash attention without positions, without and with a causal mask.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from aims import AIMED, AIMS
from records import Record, plain_parser
from relpos.inspection._drawing import COLOURS, INK, MARKERS, PALE, new_figure, tidy
from table import (
    FORM_NAMES,
    REHEARSAL,
    TITLES,
    forms_in,
    group,
    load,
    measured_with,
    sentence,
    with_unit,
)

NAMES = {
    "seconds": "time of one call",
    "peak_mib": "peak memory beyond inputs",
    "ratio": "time / time of flash attention without positions",
}
AIM = "aim for relpos: triton"
# higher ratios are in the table only, so that a tenth can be seen
CEILING = 4.0
RATIOS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)


def main(arguments: list[str] | None = None) -> None:
    """Write the picture."""
    parser = plain_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files that attention.py wrote with --json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        settings = group(x for x in load(options.records) if x["what"] == "attention")
        if not settings:
            raise ValueError("records must have one of attention; got none. Run attention.py with --json.")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(settings).savefig(options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def draw(settings: list[list[Record]]) -> Figure:
    """A row for each quantity, a column for each pass; all axes are logarithmic."""
    first = max(settings, key=lambda records: len({x["length"] for x in records}))
    rows = [(field, first) for field in ("seconds", "peak_mib") if any(x[field] is not None for x in first)]
    if any(name.startswith("sdpa_") for name in forms_in(first)):
        same = ("dtype", "heads", "d_k", "max_distance")
        alike = [x for x in settings if all(x[0][name] == first[0][name] for name in same)]
        rows = [("ratio", records) for records in alike]
    passes = [name for name in TITLES if any(x["pass"] == name for x in first)]
    figure = new_figure(1.6 + 3.2 * max(1, len(rows)))
    grid = figure.subplots(len(rows), len(passes), sharex=True, sharey="row", squeeze=False)
    for panels, (field, records) in zip(grid, rows, strict=True):
        for axes, name in zip(panels, passes, strict=True):
            _draw_lines(axes, [x for x in records if x["pass"] == name], field, forms_in(first))
            causal = ", causal" if records[0]["is_causal"] else ""
            axes.set_title(f"{NAMES[field]}, {TITLES[name]}{causal}", fontsize=9, color=INK, loc="left")
            for aim in AIMS if field == "ratio" and records[0]["d_k"] == AIMED["d_k"] else ():
                if aim.field == "sdpa_flash" and name in aim.passes:
                    axes.plot(aim.lengths, [aim.bound] * len(aim.lengths), label=AIM, color="#B00000")
    lengths = sorted({x["length"] for x in first})
    for axes in grid[-1]:
        # the panels share their ticks
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("length, tokens", fontsize=10, color=INK)
    _add_legend(figure, first)
    figure.supxlabel(_caption(first), fontsize=9, color="#555555")
    return figure


def _draw_lines(axes: Axes, records: list[Record], field: str, forms: list[str]) -> None:
    """A line for each form."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for index, name in enumerate(forms):
        points = sorted((x["length"], _value(x, field)) for x in records if x["side"] == name)
        points = [(length, value) for length, value in points if value]
        if not points:
            continue
        label = FORM_NAMES.get(name, name)
        is_ours = label.startswith("relpos")
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            # black, the last colour, for the form that the others are compared with
            color=COLOURS[(index - 1) % len(COLOURS)],
            linestyle="-" if is_ours else "--",
            linewidth=2 if is_ours else 1.5,
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            markerfacecolor=None if is_ours else "none",
        )
    tidy(axes)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.yaxis.set_minor_formatter(NullFormatter())
    if field == "ratio":
        lowest = min((_value(x, field) or 1.0 for x in records), default=1.0)
        axes.set_ylim(min(0.5, 0.9 * lowest), CEILING)
        axes.yaxis.set_major_locator(FixedLocator(RATIOS))
    else:
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, field)))


def _value(record: Record, field: str) -> float | None:
    return record["ratio_to"].get("sdpa_flash") if field == "ratio" else record[field]


def _add_legend(figure: Figure, records: list[Record]) -> None:
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    shown = [x for x in (*(FORM_NAMES.get(name, name) for name in forms_in(records)), AIM) if x in lines]
    legend = figure.legend(
        [lines[label] for label in shown],
        shown,
        title=REHEARSAL.strip(": ") if records[0]["rehearsal"] else None,
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=10,
        handlelength=3.5,
    )
    legend.get_title().set_color("#B00000")


def _tick(value: float, field: str) -> str:
    # powers of ten have many digits in units that are powers of two
    words = {"seconds": with_unit(value), "peak_mib": f"{value:,g} MiB"}
    return words.get(field, f"{value:g}")


def _caption(records: list[Record]) -> str:
    """The setting, why lines end before others, and versions."""
    reasons = dict.fromkeys(x["reason"] for x in records if str(x["reason"]).startswith("needs more"))
    ends = (f"A line ends where one call {reason}." for reason in reasons)
    return "\n".join([sentence(records), *ends, measured_with(records)])


if __name__ == "__main__":
    main()
