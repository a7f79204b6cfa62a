"""Records of attention as a picture, for a CPU or a GPU: time and memory against length.

    python benchmarks/plot.py benchmarks/results/attention.jsonl --out docs/attention.png

Of several settings the one with the most lengths is drawn.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from records import Record, plain_parser
from relpos.inspection._style import COLOURS, INK, MARKERS, PALE, new_figure, tidy
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

NAMES = {"seconds": "time of one call", "peak_mib": "peak memory beyond inputs"}


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
    records = max(settings, key=lambda records: len({x["length"] for x in records}))
    rows = [field for field in NAMES if any(x[field] is not None for x in records)]
    passes = [name for name in TITLES if any(x["pass"] == name for x in records)]
    figure = new_figure(1.6 + 3.2 * max(1, len(rows)))
    grid = figure.subplots(len(rows), len(passes), sharex=True, sharey="row", squeeze=False)
    for panels, field in zip(grid, rows, strict=True):
        for axes, name in zip(panels, passes, strict=True):
            _draw_lines(axes, [x for x in records if x["pass"] == name], field, forms_in(records))
            axes.set_title(f"{NAMES[field]}, {TITLES[name]}", fontsize=11, color=INK, loc="left")
    lengths = sorted({x["length"] for x in records})
    for axes in grid[-1]:
        # the panels share their ticks
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("length, tokens", fontsize=10, color=INK)
    _add_legend(figure, records)
    reasons = dict.fromkeys(x["reason"] for x in records if str(x["reason"]).startswith("needs more"))
    ends = (f"A line ends where one call {reason}." for reason in reasons)
    caption = "\n".join([sentence(records), *ends, measured_with(records)])
    figure.supxlabel(caption, fontsize=9, color="#555555")
    return figure


def _draw_lines(axes: Axes, records: list[Record], field: str, forms: list[str]) -> None:
    """A line for each form."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for index, name in enumerate(forms):
        points = sorted((x["length"], x[field]) for x in records if x["side"] == name and x[field])
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
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    # powers of ten have many digits in units that are powers of two
    words = with_unit if field == "seconds" else "{:,g} MiB".format
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))


def _add_legend(figure: Figure, records: list[Record]) -> None:
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    shown = [x for x in (FORM_NAMES.get(name, name) for name in forms_in(records)) if x in lines]
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


if __name__ == "__main__":
    main()
