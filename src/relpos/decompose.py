"""Content and position parts of the logits and of the outputs (paper, equations 3 and 4).

For looking at short sentences: everything is [batch, heads, query, key] in full, without dropout.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relpos._inputs import (
    FLOAT_DTYPES,
    Inputs,
    check,
    check_layout,
    check_start,
    in_four_dimensions,
    kind_of,
    sizes_of,
)
from relpos._masks import combine_masks, key_mask, merge_masks
from relpos._positions import label_table, two_sides


@dataclass(frozen=True)
class Parts:
    """What content and position each add; float32, or float64 where an argument is.

        weights = softmax( content_logits + position_logits + mask )
        out     = content_out + position_out

    Attributes:
        content_logits: scale * query[i] . key[j], [batch, heads, query, key], masked pairs included.
        position_logits: scale * query[i] . rel_k[r(i,j)], likewise; zeros without rel_k.
        allowed: bool [batch, heads, query, key], False where a mask forbids the pair.
        weights: [batch, heads, query, key], before dropout; zeros for a query with no key.
        content_out: sum_j weights[i,j] value[j], [batch, heads, query, d_v].
        position_out: sum_j weights[i,j] rel_v[r(i,j)], likewise; zeros without rel_v.
        labels: int64, the row r(i,j) of each pair, [1 or batch, 1, query, key].
    """

    content_logits: Tensor
    position_logits: Tensor
    allowed: Tensor
    weights: Tensor
    content_out: Tensor
    position_out: Tensor
    labels: Tensor


def decompose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    max_distance: int | tuple[int, int] | None = None,
    query_start: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Parts:
    """Split attention into what the tokens add and what their distances add.

        query[i] . (key[j] + rel_k[r(i,j)])            = content_logits + position_logits    (over scale)
        sum_j weights[i,j] (value[j] + rel_v[r(i,j)])  = content_out + position_out

    Args:
        query, key, value, rel_k, rel_v, and the keywords: as `relpos.relative_attention`.
    Returns:
        The parts; `content_out + position_out` is what `relative_attention` returns.
    Raises:
        ValueError, TypeError: as `relative_attention`.
    Source: Shaw et al. 2018, eq. 3-4, split as in section 3.3.
    """
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        max_distance=max_distance,
        query_start=query_start,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        is_causal=is_causal,
        scale=scale,
    )
    query, key, value = _in_full(inputs)
    shape = (*query.shape[:3], key.shape[2])  # [batch, heads, query, key]
    labels = _labels(inputs.query_start, shape, inputs.left, inputs.right, query.device)

    content_logits = inputs.scale * query @ key.mT
    position_logits = torch.zeros_like(content_logits)
    if inputs.rel_k is not None:
        by_label = inputs.scale * query @ inputs.rel_k.to(query.dtype).mT  # [batch, heads, query, labels]
        position_logits = by_label.gather(-1, labels.expand(shape))

    weights, allowed = _softmax(inputs, content_logits + position_logits)
    content_out = weights @ value
    position_out = torch.zeros_like(content_out)
    if inputs.rel_v is not None:
        by_label = weights.new_zeros(*shape[:3], inputs.num_labels).scatter_add(
            -1, labels.expand(shape), weights
        )
        position_out = by_label @ inputs.rel_v.to(query.dtype)
    return Parts(content_logits, position_logits, allowed, weights, content_out, position_out, labels)


def by_distance(
    x: Tensor,
    *,
    max_distance: int | tuple[int, int],
    query_start: int | Tensor = 0,
    where: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The mean, or the sum, of a number for each pair, over the pairs that share a row of the tables.

    Args:
        x: [batch, heads, query, key].
        max_distance: k, or (left, right), in tokens: what lies beyond counts with the last row. It need not
            be that of the tables.
        query_start: position of the first query among the keys, an int or integers [batch].
        where: bool, broadcastable to x: the pairs that count. Default: all.
        reduction: "mean" or "sum".
    Returns:
        [heads, labels], labels = left + right + 1; row `left` is distance 0. Where no pair has the distance,
        the mean is NaN and the sum 0.
    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
    """
    left, right = _checked_sides(x, max_distance, query_start, where, reduction)
    labels = _labels(query_start, tuple(x.shape), left, right, x.device).expand(x.shape)
    counts = torch.ones_like(x)
    if where is not None:
        # filled, not multiplied: a pair that does not count may hold anything
        x, counts = x.masked_fill(~where, 0.0), counts.masked_fill(~where, 0.0)
    by_head = [y.transpose(0, 1).flatten(1) for y in (x, counts, labels)]  # [heads, batch * query * key]
    zeros = x.new_zeros(x.shape[1], left + right + 1)
    total = zeros.scatter_add(1, by_head[2], by_head[0])
    if reduction == "sum":
        return total
    return total / zeros.scatter_add(1, by_head[2], by_head[1])


def _checked_sides(
    x: Tensor,
    max_distance: int | tuple[int, int],
    query_start: int | Tensor,
    where: Tensor | None,
    reduction: str,
) -> tuple[int, int]:
    """(left, right) for the arguments of `relpos.decompose.by_distance`.

    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor; got {kind_of(x)}. Make it a tensor.")
    check_layout("x", x)
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"x must be float64, float32, bfloat16 or float16; got {x.dtype}. Convert it with .to()."
        )
    if x.dim() != 4:
        raise ValueError(
            f"x must have 4 dimensions, [batch, heads, query, key]; got {sizes_of(x)}. "
            "Unsqueeze what is missing."
        )
    sides = two_sides(max_distance)
    if sides is None:
        raise TypeError(
            "max_distance must be an integer k, or two integers (left, right); got None. Give one of these."
        )
    if query_start is None:
        raise TypeError(
            "query_start must be an integer or an integer tensor [batch]; got NoneType. Leave it out for 0."
        )
    check_start(query_start, x, "x")
    if where is not None:
        if not isinstance(where, Tensor):
            raise TypeError(f"where must be a bool tensor or None; got {kind_of(where)}. Make it a tensor.")
        if where.dtype != torch.bool:
            raise TypeError(
                f"where must be a bool tensor or None; got {where.dtype}. Convert it with .bool()."
            )
        if where.device != x.device:
            raise ValueError(
                f"where must be on the device of x = {x.device}; got {where.device}. Move it with .to()."
            )
        in_four_dimensions("where", where, x, x.mT)  # x.mT has as many rows as there are keys
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}. Give one of these.")
    return sides


def _in_full(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with as many heads each, in the dtype of the sums; absent keys are zeros."""
    query, key, value = (x.to(inputs.compute_dtype) for x in (inputs.query, inputs.key, inputs.value))
    if inputs.key_lengths is not None:
        is_absent = ~key_mask(inputs.key_lengths, key.shape[2]).mT  # [batch, 1, key, 1]
        key, value = key.masked_fill(is_absent, 0.0), value.masked_fill(is_absent, 0.0)
    if inputs.num_groups > 1:
        key, value = (x.repeat_interleave(inputs.num_groups, dim=1) for x in (key, value))
    return query, key, value


def _labels(
    query_start: int | Tensor, shape: tuple[int, ...], left: int, right: int, device: torch.device
) -> Tensor:
    """[1 or batch, 1, query, key]"""
    labels = label_table(shape[2], shape[3], query_start, left, right, device)
    return labels[:, None] if labels.dim() == 3 else labels[None, None]


def _softmax(inputs: Inputs, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, allowed), both [batch, heads, query, key]."""
    allowed, additive = combine_masks(
        inputs.query.shape[2],
        inputs.key.shape[2],
        inputs.query_start,
        attn_mask=inputs.attn_mask,
        key_lengths=inputs.key_lengths,
        is_causal=inputs.is_causal,
        device=inputs.query.device,
    )
    bias, is_empty = merge_masks(allowed, additive, logits.dtype)
    everywhere = torch.ones_like(logits, dtype=torch.bool)
    if bias is None or is_empty is None:
        return torch.softmax(logits, -1), everywhere
    weights = torch.softmax(logits + bias, -1).masked_fill(is_empty, 0.0)
    return weights, everywhere & (bias != float("-inf")) & ~is_empty
