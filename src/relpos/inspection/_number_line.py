"""A figure for section 3.2 of the paper: from two positions to a distance to a row of the table."""

import torch
from torch import Tensor

from relpos._positions import clip_distance, distances
from relpos.inspection._optional_dependencies import Axes, Figure
from relpos.inspection._style import INK, new_figure, row_colours, signed, title


def plot_number_line(n: int = 4, k: int = 2) -> Figure:
    """Plot a sentence of n tokens: each distance j - i, its row, and the rows shared beyond k.

    Args:
        n: number of tokens.
        k: clipping distance in tokens; the table has 2k + 1 rows.
    Raises:
        ValueError: n is less than 1 or k less than 0.
    """
    if n < 1 or k < 0:
        raise ValueError(f"n must be at least 1 and k at least 0; got n = {n}, k = {k}.")
    distance = distances(n, n, 0, torch.device("cpu"))
    rows = clip_distance(distance, k, k)
    figure = new_figure(6.4)
    grid = figure.add_gridspec(2, 2, height_ratios=[1.75, 1])
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _draw_matrix(left, distance, rows, k, is_signed=True)
    title(left, "1. Distance of key j from query i: j \N{MINUS SIGN} i")
    _draw_matrix(right, rows, rows, k, is_signed=False)
    title(right, f"2. Row of the table: clip(j \N{MINUS SIGN} i, \N{MINUS SIGN}{k}, {k}) + {k}")
    _draw_line(figure.add_subplot(grid[1, :]), n, k)
    return figure


def _draw_matrix(axes: Axes, numbers: Tensor, rows: Tensor, k: int, *, is_signed: bool) -> None:
    n = len(numbers)
    axes.imshow(rows.tolist(), cmap=row_colours(k, k), vmin=-0.5, vmax=2 * k + 0.5)
    size = max(6.0, min(15.0, 75 / n))
    for i, line in enumerate(numbers.tolist()):
        for j, number in enumerate(line):
            text = signed(number) if is_signed else str(number)
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color=INK)
    step = max(1, n // 12)
    axes.set_xticks(range(0, n, step), [str(j + 1) for j in range(0, n, step)])
    axes.set_yticks(range(0, n, step), [str(i + 1) for i in range(0, n, step)])
    axes.set_xlabel("key: token j", fontsize=11, color=INK)
    axes.set_ylabel("query: token i", fontsize=11, color=INK)
    axes.tick_params(length=0, labelsize=10)
    axes.spines[:].set_visible(False)
    axes.set_xticks([j - 0.5 for j in range(n + 1)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(n + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)


def _draw_line(axes: Axes, n: int, k: int) -> None:
    """Draw distances above, rows below, and a line from each distance to its row."""
    furthest = max(n - 1, k)
    colours = row_colours(k, k)
    size = max(6.0, min(13.0, 130 / (2 * furthest + 1)))
    box = {"boxstyle": "round,pad=0.3", "edgecolor": "#888888", "linewidth": 0.8}
    for d in range(-furthest, furthest + 1):
        row = min(max(d, -k), k) + k
        axes.plot([d, row - k], [1, 0], color="#888888", linewidth=1.2, zorder=1)
        is_there = abs(d) < n
        shade = {"facecolor": colours(row) if is_there else "white"}
        axes.text(
            d,
            1,
            signed(d),
            ha="center",
            va="center",
            fontsize=size,
            bbox=box | shade,
            color=INK if is_there else "#999999",
        )
    for row in range(2 * k + 1):
        axes.text(
            row - k,
            0,
            str(row),
            ha="center",
            va="center",
            fontsize=size,
            bbox=box | {"facecolor": colours(row)},
        )
    axes.set_xlim(-furthest - 0.6, furthest + 0.6)
    axes.set_ylim(-0.35, 1.35)
    axes.set_yticks([0, 1], [f"row, of {2 * k + 1}", f"distance, of {2 * n - 1}"], fontsize=11)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if furthest > k:
        title(axes, f"3. Distances beyond {k} share the row at the end")
    else:
        title(axes, "3. Every distance has a row of its own")
