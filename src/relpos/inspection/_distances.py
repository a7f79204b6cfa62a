"""The plot of distances in each layer: position logits above, norms of rel_v below."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos._positions import distances
from relpos.inspection._observation import Observation
from relpos.inspection._optional_dependencies import Axes, Figure
from relpos.inspection._style import (
    INK,
    SHADE,
    WIDTH,
    distance_ticks,
    layer_name,
    limits,
    line_style,
    new_figure,
    say,
    tidy,
    title,
)

_MOST_COLUMNS = 3


def plot_distances(observations: Sequence[Observation]) -> Figure:
    """Plot, for each layer, the mean position logit of each distance and head, and the norms of rel_v.

    Several calls of one layer are averaged, weighted by the number of pairs. Rows that no pair used, such as
    those after the query in a decoder, are omitted.

    Args:
        observations: the result of `observe` for one model.
    Raises:
        ValueError: there are no observations.
    """
    if not observations:
        raise ValueError(
            "observations must hold at least one; got none. Either the model has no relative positions, "
            "or `run` did not call it."
        )
    layers = _layers(observations)
    columns = min(_MOST_COLUMNS, len(layers))
    bands = math.ceil(len(layers) / columns)
    figure = new_figure(0.9 + 4.3 * bands)
    grid = figure.add_gridspec(2 * bands, columns, height_ratios=[1.5, 1] * bands)
    logit_limits = limits([v for layer in layers for v in layer.position.flatten().tolist()] + [0.0])
    norm_limits = (0.0, limits([v for layer in layers for v in layer.norms.flatten().tolist()] + [0.0])[1])

    num_heads = max(len(layer.position) for layer in layers)
    for index, layer in enumerate(layers):
        band, column = divmod(index, columns)
        above = figure.add_subplot(grid[2 * band, column])
        below = figure.add_subplot(grid[2 * band + 1, column])
        _draw_logits(above, layer, logit_limits, is_first=column == 0)
        _draw_norms(below, layer, norm_limits, is_first=column == 0)
    lines: list[Any] = figure.axes[0].lines[1 : num_heads + 1]
    figure.suptitle(
        "How much each distance attracts attention (top) and how strongly it marks the output (bottom)",
        fontsize=12.5,
        color=INK,
        x=0.01,
        ha="left",
    )
    if num_heads > 1 and lines:
        per_line = int(WIDTH // 1.05)
        names = [f"head {head}" for head in range(1, num_heads + 1)]
        figure.legend(
            lines,
            names,
            loc="outside lower center",
            ncols=min(num_heads, per_line),
            fontsize=10,
            frameon=False,
        )
    return figure


@dataclass(frozen=True)
class _Layer:
    """The mean of a layer's calls; `position` is [heads, labels], `norms` [1 or heads, labels] or empty."""

    name: str
    left: int
    right: int
    position: Tensor
    norms: Tensor
    has_rel_k: bool
    # the last row is distance 0 and no pair lies beyond it, as in a decoder
    ends_at_query: bool

    @property
    def distances(self) -> list[int]:
        return list(range(-self.left, self.right + 1))


def _layers(observations: Sequence[Observation]) -> list[_Layer]:
    calls: dict[str, list[Observation]] = {}
    for observation in observations:
        calls.setdefault(observation.layer, []).append(observation)
    return [_merged(same) for same in calls.values()]


def _merged(calls: list[Observation]) -> _Layer:
    first = calls[0]
    pairs = torch.stack([call.pairs for call in calls]).sum(0)
    total = torch.stack([(call.position_by_distance * call.pairs).nan_to_num(0.0) for call in calls]).sum(0)
    norms = torch.empty(0)
    if first.rel_v_norms is not None:
        norms = first.rel_v_norms.masked_fill(pairs.sum(0) == 0, float("nan"))
    ends_at_query = first.right == 0 and not any(_looks_ahead(call) for call in calls)
    position = total / pairs  # [heads, labels], NaN where there is no pair
    return _Layer(
        layer_name(first.layer), first.left, first.right, position, norms, first.has_rel_k, ends_at_query
    )


def _looks_ahead(call: Observation) -> bool:
    num_queries, num_keys = call.allowed.shape[2:]
    is_ahead = distances(num_queries, num_keys, call.query_start, call.allowed.device) > 0
    return bool((call.allowed & is_ahead).any())


def _draw_logits(axes: Axes, layer: _Layer, ends: tuple[float, float], *, is_first: bool) -> None:
    title(axes, layer.name, 11)
    axes.axhline(0, color="#888888", linewidth=0.8)
    if not layer.has_rel_k:
        say(axes, "no table on the keys")
        return
    for head, logits in enumerate(layer.position.tolist()):
        axes.plot(layer.distances, logits, linewidth=1.6, marker=".", markersize=5, **line_style(head))
    _mark_distances(axes, layer)
    axes.set_ylim(*ends)
    axes.tick_params(labelleft=is_first, labelbottom=False)
    if is_first:
        axes.set_ylabel("mean position logit (nats)", fontsize=10, color=INK)


def _draw_norms(axes: Axes, layer: _Layer, ends: tuple[float, float], *, is_first: bool) -> None:
    if not layer.norms.numel():
        say(axes, "no table on the values")
        return
    for head, norms in enumerate(layer.norms.tolist()):
        style = line_style(head) if len(layer.norms) > 1 else {"color": INK, "linestyle": "-"}
        axes.plot(layer.distances, norms, linewidth=1.6, marker=".", markersize=5, **style)
    _mark_distances(axes, layer)
    axes.set_ylim(*ends)
    axes.tick_params(labelleft=is_first)
    axes.set_xlabel("distance j \N{MINUS SIGN} i (tokens)", fontsize=10, color=INK)
    if is_first:
        axes.set_ylabel("norm of rel_v row", fontsize=10, color=INK)


def _mark_distances(axes: Axes, layer: _Layer) -> None:
    """Draw ticks, a line at the query, and a shade on the ends, which include all distances beyond."""
    tidy(axes)
    left, right = layer.left, layer.right
    axes.set_xlim(-left - 0.6, right + 0.6)
    axes.axvspan(-left - 0.6, -left + 0.4, color=SHADE, zorder=0)
    if not layer.ends_at_query:
        axes.axvspan(right - 0.4, right + 0.6, color=SHADE, zorder=0)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    places, words = distance_ticks(left, right)
    axes.set_xticks(places, [*words[:-1], "0"] if layer.ends_at_query else words, fontsize=9)
