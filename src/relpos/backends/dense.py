"""Attention with the logits in full, [batch, heads, query, key], from plain torch operations on any device.

The paper's efficient form (section 3.3) without its [query, key, dim] tensor: query times the rows of rel_k,
then a gather; weights summed for each row of rel_v, then times the rows. In shapes, group = batch * heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos._inputs import Inputs, can_look_at
from relpos._masks import combine_masks, key_mask, merge_masks
from relpos._positions import label_table
from relpos.backends.backend import reasons_against_operators
from relpos.backends.pairs import BLOCK, Clipped, Labelled, Pairs


def why_not(inputs: Inputs) -> list[str]:
    """Always empty: dense takes everything that the checks let through."""
    return []


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse is None where it was not asked for."""
    out, lse, _ = _attend(inputs)
    return out, lse


def run_with_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, weights), the weights before dropout, [batch, heads, query, key], in the dtype of query."""
    out, _, weights = _attend(inputs)
    return out, weights.to(inputs.query.dtype)


def _attend(inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor]:
    """out; lse, or None; and the weights before dropout, [batch, heads, query, key]."""
    query, key, value = _grouped(inputs)
    rel_k, rel_v, pairs = _reached(inputs)
    bias, is_empty = _masks(inputs)
    shape = (*inputs.query.shape[:3], key.shape[1])  # batch, heads, query, key

    logits = _logits(query, key, rel_k, pairs, bias, shape)
    weights = torch.softmax(logits, -1)
    if is_empty is not None:
        weights = weights.masked_fill(is_empty, 0.0)
    dropped = F.dropout(weights, inputs.dropout_p) if inputs.dropout_p > 0 else weights
    out = _out(dropped, value, rel_v, pairs)  # [batch, heads, query, d_v]
    lse = None
    if inputs.return_lse:
        lse = torch.logsumexp(logits, -1)  # [batch, heads, query]
        lse = lse if is_empty is None else lse.masked_fill(is_empty.squeeze(-1), float("-inf"))
    return out.to(inputs.query.dtype), lse, weights


def _grouped(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query [group, query, d_k], key [group, key, d_k], value [group, key, d_v], in the dtype of the sums."""
    dtype = inputs.compute_dtype
    query, key, value = inputs.query.to(dtype), inputs.key.to(dtype), inputs.value.to(dtype)
    if inputs.key_lengths is not None:
        exists = key_mask(inputs.key_lengths, key.shape[2]).mT  # [batch, 1, key, 1]
        key, value = _without_absent(key, exists), _without_absent(value, exists)
    if inputs.num_groups > 1:
        key, value = (x.repeat_interleave(inputs.num_groups, dim=1) for x in (key, value))
    return (query * inputs.scale).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _without_absent(x: Tensor, exists: Tensor) -> Tensor:
    """x with zeros where a key is absent: a weight of 0 times NaN is NaN, forward and backward."""
    values = x.detach()
    # NaN and infinity answer no, and so may finite numbers that are huge
    is_known_finite = can_look_at(values) and bool(torch.linalg.vector_norm(values) < float("inf"))
    # on a CPU a norm and a product cost a third of a fill under a mask that broadcasts
    return x * exists if is_known_finite else x.masked_fill(~exists, 0.0)


def _reached(inputs: Inputs) -> tuple[Tensor | None, Tensor | None, Pairs]:
    """The rows of each table that a pair may use, and the labels of all pairs, which count those rows."""
    batch, heads, num_queries, _ = inputs.query.shape
    num_keys = inputs.key.shape[2]
    if inputs.relations is not None:
        # one more row, of zeros, for pairs without a relation
        labels = torch.where(inputs.relations < 0, inputs.num_labels, inputs.relations.long())
        rel_k, rel_v = (
            None if x is None else F.pad(x.to(inputs.compute_dtype), (0, 0, 0, 1))
            for x in (inputs.rel_k, inputs.rel_v)
        )
        return rel_k, rel_v, Labelled(labels.expand(batch, heads, num_queries, num_keys))
    first, last = _reach(inputs)
    rel_k, rel_v = (
        None if x is None else x.to(inputs.compute_dtype).narrow(-2, first + inputs.left, last - first + 1)
        for x in (inputs.rel_k, inputs.rel_v)
    )
    start = inputs.query_start
    # the blocks have rules for plain autograd alone, and save nothing where there is but one; sizes are asked
    # last, since a comparison ties a graph to them
    if not _is_transformed() and type(start) is int and num_queries > BLOCK:
        return rel_k, rel_v, Clipped(num_keys, start, -first, last)
    labels = label_table(num_queries, num_keys, start, -first, last, inputs.query.device)
    if labels.dim() == 3:
        labels = labels[:, None]  # [batch, 1, query, key]
    return rel_k, rel_v, Labelled(labels.expand(batch, heads, num_queries, num_keys))


def _is_transformed() -> bool:
    """Whether somebody else than plain autograd looks at what is computed."""
    return torch.compiler.is_compiling() or bool(reasons_against_operators())


def _reach(inputs: Inputs) -> tuple[int, int]:
    """The first and the last distance for which a row is needed, clipped to the tables."""
    start, num_queries, num_keys = inputs.query_start, inputs.query.shape[2], inputs.key.shape[2]
    first, last = -inputs.left, inputs.right
    if inputs.is_causal:
        last = 0
    # a compiled graph serves every length, so it keeps the rows that only longer ones use
    if not isinstance(start, Tensor) and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        first = max(first, min(1 - num_queries - start, last))
        last = min(last, max(num_keys - 1 - start, first))
    # matrix products like a multiple of 8 rows better than fewer rows
    first = max(-inputs.left, first - (first - last - 1) % 8)
    last = min(inputs.right, last + (first - last - 1) % 8)
    return first, last


def _masks(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    allowed, additive = combine_masks(
        inputs.query.shape[2],
        inputs.key.shape[2],
        inputs.query_start,
        attn_mask=inputs.attn_mask,
        key_lengths=inputs.key_lengths,
        is_causal=inputs.is_causal,
        device=inputs.query.device,
    )
    bias, is_empty = merge_masks(allowed, additive, inputs.compute_dtype)
    if is_empty is not None and can_look_at(is_empty) and not is_empty.any():
        is_empty = None
    return bias, is_empty


def _logits(
    query: Tensor,
    key: Tensor,
    rel_k: Tensor | None,
    pairs: Pairs,
    bias: Tensor | None,
    shape: tuple[int, ...],
) -> Tensor:
    """[batch, heads, query, key], which is `shape`."""
    if rel_k is None:
        logits = torch.bmm(query, key.mT).view(shape)
        return logits if bias is None else logits + bias
    by_label = _times_rows(query, rel_k.mT, shape)  # [group, query, labels]
    if pairs.is_fresh:
        # in place: at 2,048 tokens fresh memory takes as long as the product
        logits = pairs.spread(by_label).baddbmm_(query, key.mT).view(shape)
        return logits if bias is None else logits + bias
    logits = pairs.spread(by_label).view(shape)
    if bias is not None:
        # under vmap the logits may lack the dimension that the bias has
        logits = logits + bias if torch._C._are_functorch_transforms_active() else logits.add_(bias)
    return torch.baddbmm(logits.flatten(0, 1), query, key.mT).view(shape)


def _out(weights: Tensor, value: Tensor, rel_v: Tensor | None, pairs: Pairs) -> Tensor:
    by_key = weights.flatten(0, 1)  # [group, query, key]
    if rel_v is None:
        out = torch.bmm(by_key, value)
    else:
        by_label = pairs.collect(by_key, rel_v.shape[-2])  # [group, query, labels]
        out = torch.baddbmm(_times_rows(by_label, rel_v, weights.shape), by_key, value)
    return out.view(*weights.shape[:3], value.shape[2])


def _times_rows(x: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x [group, query, a] times rows [a, c] or [heads, a, c]: [group, query, c]; shape begins as all do."""
    if rows.dim() == 2:
        return x @ rows
    by_head = x.view(*shape[:3], x.shape[2])  # [batch, heads, query, a]
    return torch.einsum("bhna,hac->bhnc", by_head, rows).reshape(*x.shape[:2], rows.shape[2])
