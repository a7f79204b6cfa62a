"""The style of the figures: size, a palette for colour-blind readers, axes, ticks.

It uses matplotlib's object interface, without pyplot: no global state, no window.
"""

import re
from collections.abc import Sequence
from typing import Any

from relpos.inspection._optional_dependencies import Axes, Figure, FigureCanvasAgg, ListedColormap

# 900 pixels at 100 dots per inch: the width of the report's column
WIDTH = 9.0
DPI = 100
# Okabe and Ito's palette, without its yellow, which is too light for lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
INK, PALE, SHADE = "#222222", "#d9d9d9", "#eef3f7"
MINUS = "\N{MINUS SIGN}"


def new_figure(height: float) -> Figure:
    """An empty white figure, 9 inches wide and `height` inches high."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def line_style(index: int) -> dict[str, Any]:
    """Colour and dash of line `index`; 28 lines differ."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def variant_style(index: int) -> dict[str, Any]:
    """Colour, dash and marker of variant `index`, the same in all figures."""
    return {**line_style(index), "marker": MARKERS[index % len(MARKERS)]}


def tidy(axes: Axes) -> None:
    """Keep two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)


def say(axes: Axes, text: str) -> None:
    """Write a text in the middle of empty axes."""
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=11, color="#555555"
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def title(axes: Axes, text: str, size: float = 12) -> None:
    """Write a title, aligned left."""
    axes.set_title(text, loc="left", fontsize=size, color=INK)


def signed(distance: int) -> str:
    """A distance with its sign: +1, 0, −1."""
    return "0" if distance == 0 else f"{distance:+d}".replace("-", MINUS)


def layer_name(module: str) -> str:
    """The name of a layer: "encoder, layer 1" for encoder.layers.0.self_attn; other names unchanged."""
    found = re.fullmatch(r"(?:.*\.)?(\w+)\.layers\.(\d+)(?:\.self_attn)?", module)
    return f"{found[1]}, layer {int(found[2]) + 1}" if found else module or "attention"


def row_colours(left: int, right: int) -> ListedColormap:
    """A pale colour for each row of a table: orange before the query, white for distance 0, blue after it."""
    shades = [_mix("#E69F00", (left - row) / max(left, 1)) for row in range(left)]
    shades += ["#ffffff"]
    shades += [_mix("#56B4E9", (row + 1) / max(right, 1)) for row in range(right)]
    return ListedColormap(shades)


def distance_ticks(left: int, right: int, *, most: int = 5) -> tuple[list[int], list[str]]:
    """Ticks and labels of an axis of distances; ≤ and ≥ mark the clipped ends."""
    step = max(1, -(-(left + right) // (most - 1)))
    inner = [d for d in range(-left + 1, right) if d % step == 0 and d + left >= step / 2 <= right - d]
    places = sorted({-left, *inner, 0, right})
    words = {-left: f"≤{signed(-left)}", right: f"≥{signed(right)}"}
    if left == 0:
        words[0] = "≤0"
    if right == 0:
        words[0] = "≥0" if left else "all"
    return places, [words.get(d, signed(d)) for d in places]


def limits(values: Sequence[float], *, pad: float = 0.08) -> tuple[float, float]:
    """Limits of an axis for these values, with padding; finite also if there are none or all are equal."""
    known = [v for v in values if v == v and abs(v) != float("inf")]
    if not known:
        return -1.0, 1.0
    low, high = min(known), max(known)
    room = (high - low) * pad or abs(high) * pad or 1.0
    return low - room, high + room


def _mix(colour: str, strength: float) -> str:
    """The colour mixed with white: a share from 0.2 to 0.8 as strength goes from 0 to 1."""
    share = 0.2 + 0.6 * strength
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)
