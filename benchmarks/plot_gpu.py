"""The last run of gpu_check.sh as a picture: time over that of flash attention without positions, by length.

python benchmarks/plot_gpu.py benchmarks/results/gpu-h200.jsonl --plot FILE.png [--d-k 64 --max-distance 16]
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gpu_forms import SIDES
from gpu_table import AIMS, PASSES, REHEARSAL, SIDE_NAMES, last_run, measured_with
from records import count, number
from relpos.inspection._style import COLOURS, INK, MARKERS, PALE, new_figure, tidy

Record = dict[str, Any]

TITLE = "Time over that of flash attention without positions"
AIM = "aim for relpos: triton"
# what is slower by more is said in words, so that a tenth can be seen
CEILING = 4.0
TICKS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)


def main(arguments: list[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("records", type=Path, help="JSON lines that gpu_check.sh wrote")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--d-k", type=count, help="default: that of the first record")
    parser.add_argument("--max-distance", type=lambda text: number(int, 0, float("inf"), text))
    options = parser.parse_args(arguments)
    try:
        figure = draw(chosen(last_run(options.records), options.d_k, options.max_distance))
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.plot)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def chosen(records: list[Record], d_k: int | None, max_distance: int | None) -> list[Record]:
    """The measurements of one width of a head and one k, those of the first record where none is given.

    Raises:
        ValueError: there is none.
    """
    measured = [x for x in records if x["what"] == "attention"]
    for name, wanted in (("d_k", d_k), ("max_distance", max_distance)):
        there = list(dict.fromkeys(x[name] for x in measured))
        wanted = wanted if wanted is not None or not there else there[0]
        measured = [x for x in measured if x[name] == wanted]
        if not measured:
            raise ValueError(f"--{name.replace('_', '-')} must be one of {there}; got {wanted}.")
    return measured


def draw(records: list[Record]) -> Figure:
    """A column for each pass, a row without and a row with a causal mask; both axes are logarithmic."""
    figure = new_figure(7.6)
    grid = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False)
    is_aimed = (records[0]["d_k"], records[0]["max_distance"]) == (64, 16)
    for row, is_causal in zip(grid, (False, True), strict=True):
        for axes, name in zip(row, PASSES, strict=True):
            some = [x for x in records if (x["is_causal"], x["pass"]) == (is_causal, name)]
            title = f"{PASSES[name]}{', causal' if is_causal else ''}"
            axes.set_title(title, fontsize=11, color=INK, loc="left")
            _draw_sides(axes, some)
            if is_aimed:
                _draw_aim(axes, name)
    _dress(grid, records)
    _add_legend(figure, grid.flat, is_rehearsal=records[0]["rehearsal"])
    figure.supxlabel(_caption(records), fontsize=9, color="#555555")
    return figure


def _draw_sides(axes: Axes, records: list[Record]) -> None:
    """A line for each side, and in words how far those go that leave the picture."""
    beyond = []
    for index, name in enumerate(SIDES):
        points = sorted((x["length"], x["ratio_to_flash"]) for x in records if _is_drawn(x, name))
        if not points:
            continue
        is_ours = SIDE_NAMES[name].startswith("relpos")
        axes.plot(
            *zip(*points, strict=True),
            label=SIDE_NAMES[name],
            # black for the side that is the measure
            color=(*COLOURS[-1:], *COLOURS[:-1])[index],
            linestyle="-" if is_ours else "--",
            linewidth=2 if is_ours else 1.5,
            marker=MARKERS[index],
            markersize=6,
            markerfacecolor=None if is_ours else "none",
        )
        above = [ratio for _, ratio in points if ratio > CEILING]
        if above:
            ends = dict.fromkeys(_short(ratio) for ratio in (min(above), max(above)))
            beyond.append(f"{SIDE_NAMES[name]}: {' to '.join(ends)}")
    words = "\n".join(["beyond the picture", *beyond] if beyond else []) if axes.lines else "not measured"
    # at the bottom, where faster than flash attention is, and beneath all lines
    axes.text(0.03, 0.03, words, transform=axes.transAxes, va="bottom", fontsize=8, color="#555555", zorder=0)


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _is_drawn(record: Record, name: str) -> bool:
    return record["side"] == name and record["ratio_to_flash"] is not None


def _draw_aim(axes: Axes, name: str) -> None:
    """The highest ratio to flash that relpos aims at, where it aims."""
    for aim in AIMS:
        if aim.field == "ratio_to_flash" and name in aim.passes:
            ends = (min(aim.lengths), max(aim.lengths))
            axes.plot(ends, (aim.bound, aim.bound), label=AIM, color="#B00000", linewidth=1.2, marker="|")


def _dress(grid: Any, records: list[Record]) -> None:
    lengths = sorted({x["length"] for x in records})
    lowest = min((x["ratio_to_flash"] for x in records if x["ratio_to_flash"]), default=1.0)
    for axes in grid.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(min(0.5, 0.9 * lowest), CEILING)
        tidy(axes)
        axes.grid(axis="x", color=PALE, linewidth=0.6)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in grid[-1]:
        axes.set_xlabel("length, tokens", fontsize=10, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("time / time of flash", fontsize=10, color=INK)


def _add_legend(figure: Figure, panels: Iterable[Axes], *, is_rehearsal: bool) -> None:
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    names = [name for name in (*SIDE_NAMES.values(), AIM) if name in lines]
    legend = figure.legend(
        [lines[name] for name in names],
        names,
        title="\n".join([*([REHEARSAL.strip(": ")] if is_rehearsal else []), TITLE]),
        title_fontsize=12,
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=10,
        handlelength=3.5,
    )
    legend.get_title().set_color("#B00000" if is_rehearsal else INK)


def _caption(records: list[Record]) -> str:
    x = records[0]
    tokens = max(y["batch"] * y["length"] for y in records)
    setting = f"{x['device_name']}, {x['dtype']}, {tokens:,} tokens, {x['heads']} heads of {x['d_k']}"
    return f"{setting}, k {x['max_distance']}\n{measured_with(x)}"


if __name__ == "__main__":
    main()
