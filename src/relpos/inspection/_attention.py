"""The plot of one sentence in one layer: content logits, position logits and attention weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relpos.inspection._observation import Observation
from relpos.inspection._optional_dependencies import Axes, Figure
from relpos.inspection._style import INK, PALE, layer_name, new_figure, title


def plot_attention(
    observation: Observation, tokens: Sequence[str], *, head: int | None = None, row: int = 0
) -> Figure:
    """Plot content logits, position logits and weights of one sentence, with tokens on both axes.

    The mean of each row of logits is subtracted, since the softmax ignores it.

    Args:
        observation: one call of one layer.
        tokens: the text of each key. The first query is the token at `query_start`.
        head: one head, counted from 0. Default: the average of all heads.
        row: index of the sentence in the batch.
    Raises:
        ValueError: the number of tokens differs from that of keys. IndexError: no such head or sentence.
    """
    num_queries, num_keys = observation.weights.shape[2:]
    if len(tokens) != num_keys:
        raise ValueError(
            f"tokens must be as many as the keys = {num_keys}; got {len(tokens)}. Give one for padding too."
        )
    asking = list(tokens)[observation.query_start : observation.query_start + num_queries]
    allowed = observation.allowed[row].any(0)  # [query, key]
    content, position, weights = (
        _one_head(x[row], head)
        for x in (observation.content_logits, observation.position_logits, observation.weights)
    )
    content, position = _less_mean(content, allowed), _less_mean(position, allowed)
    shown = torch.cat((content[allowed], position[allowed]))
    reach = max(shown.abs().max().item() if len(shown) else 0.0, 1e-6)

    figure = new_figure(_height(num_queries, num_keys, max(map(len, tokens))))
    left, middle, right = figure.subplots(1, 3)
    logits: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -reach, "vmax": reach}
    image = _draw(left, content, allowed, tokens, asking, **logits)
    _draw(middle, position, allowed, tokens, [], **logits)
    heat = _draw(
        right, weights, allowed, tokens, [], cmap="Blues", vmin=0.0, vmax=max(weights.max().item(), 1e-6)
    )
    title(left, "Tokens: content logits")
    title(middle, "+  distances: position logits", 12)
    title(right, "=  attention weights", 12)
    left.set_ylabel("query: the token that looks", fontsize=11, color=INK)
    for axes in (left, middle, right):
        axes.set_xlabel("key: the token looked at", fontsize=11, color=INK)
    options: dict[str, Any] = {"location": "bottom", "aspect": 30}
    bars = [
        figure.colorbar(
            image, ax=[left, middle], shrink=0.5, label="logit less the row's mean (nats)", **options
        ),
        figure.colorbar(heat, ax=right, shrink=0.9, label="weight (each row sums to 1)", **options),
    ]
    for bar in bars:
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=9)
    whose = "average of all heads" if head is None else f"head {head + 1}"
    figure.suptitle(f"{layer_name(observation.layer)}: {whose}", fontsize=12.5, color=INK, x=0.01, ha="left")
    return figure


def _one_head(x: Tensor, head: int | None) -> Tensor:
    """[heads, query, key] to [query, key], in float64."""
    return x.double().mean(0) if head is None else x[head].double()


def _less_mean(logits: Tensor, allowed: Tensor) -> Tensor:
    kept = logits.masked_fill(~allowed, 0.0)
    return kept - kept.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp_min(1)


def _height(num_queries: int, num_keys: int, longest: int) -> float:
    """Height in inches: square cells in a third of the width, the longest token, the colour bars."""
    return 2.4 * max(0.35, num_queries / max(num_keys, 1)) + 1.9 + 0.07 * min(longest, 20)


def _draw(
    axes: Axes, x: Tensor, allowed: Tensor, keys: Sequence[str], queries: Sequence[str], **options: Any
) -> Any:
    axes.set_facecolor(PALE)
    numbers = x.masked_fill(~allowed, float("nan")).tolist()
    image = axes.imshow(numbers, interpolation="nearest", **options)
    size = max(5.0, min(10.0, 165 / max(len(keys), 1)))
    axes.set_xticks(range(len(keys)), [_plain(token) for token in keys], rotation=90, fontsize=size)
    axes.set_yticks(range(len(queries)), [_plain(token) for token in queries], fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _plain(token: str) -> str:
    """The token without line breaks, with dollar signs escaped, at most 20 characters."""
    text = token.replace("\n", " ").replace("$", r"\$")
    return text if len(text) <= 20 else text[:19] + "…"
