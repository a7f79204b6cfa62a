"""Equations 3 and 4 of the paper, written out: the truth of every test.

A vector a[i,j] for each pair is gathered and added to the key and to the value, as the paper writes it, so
memory is [batch, heads, query, key, dim]. It shares no code with what it judges and knows nothing of speed.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos._inputs import Inputs


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attend as the equations say.

        logits[i,j] = scale * query[i] . (key[j] + a_k[i,j])          eq. 4, before the softmax
        out[i]      = sum_j weights[i,j] * (value[j] + a_v[i,j])      eq. 3

    Returns:
        out: [batch, heads, query, d_v], dtype of query.
        lse: [batch, heads, query], log of the sum of exp(logits), or None where it was not asked for.
    """
    dtype = inputs.compute_dtype
    query, key, value = (x.to(dtype) for x in (inputs.query, inputs.key, inputs.value))
    if inputs.key_lengths is not None:
        j = torch.arange(key.shape[2], device=key.device)
        exists = (j < inputs.key_lengths[:, None])[:, None, :, None]  # [batch, 1, key, 1]
        key, value = torch.where(exists, key, 0), torch.where(exists, value, 0)
    key = key.repeat_interleave(inputs.num_groups, dim=1)  # [batch, heads, key, d_k]
    value = value.repeat_interleave(inputs.num_groups, dim=1)  # [batch, heads, key, d_v]

    labels = _labels(inputs)
    keys = key[:, :, None]  # [batch, heads, 1, key, d_k]
    if inputs.rel_k is not None:
        keys = keys + _rows(inputs.rel_k.to(dtype), labels)  # [batch, heads, query, key, d_k]
    logits = inputs.scale * (query[:, :, :, None] * keys).sum(-1)  # [batch, heads, query, key]
    weights, lse = _softmax(logits, inputs)
    if inputs.dropout_p > 0:
        weights = F.dropout(weights, inputs.dropout_p)
    values = value[:, :, None]  # [batch, heads, 1, key, d_v]
    if inputs.rel_v is not None:
        values = values + _rows(inputs.rel_v.to(dtype), labels)  # [batch, heads, query, key, d_v]
    out = (weights[..., None] * values).sum(-2)  # [batch, heads, query, d_v]
    return out.to(inputs.query.dtype), lse if inputs.return_lse else None


def _positions(inputs: Inputs) -> tuple[Tensor, Tensor]:
    device = inputs.query.device
    start = torch.as_tensor(inputs.query_start, device=device).reshape(-1, 1, 1)
    i = start + torch.arange(inputs.query.shape[2], device=device)[:, None]  # [1 or batch, query, 1]
    j = torch.arange(inputs.key.shape[2], device=device)  # [key]
    return i, j


def _labels(inputs: Inputs) -> Tensor:
    """[1 or batch, 1 or heads, query, key]"""
    if inputs.relations is not None:
        return inputs.relations.long()
    i, j = _positions(inputs)
    return (torch.clip(j - i, -inputs.left, inputs.right) + inputs.left)[:, None]


def _rows(table: Tensor, labels: Tensor) -> Tensor:
    """[1 or batch, 1 or heads, query, key, dim]"""
    # label -1, no relation, finds the row of zeros at the end
    table = F.pad(table, (0, 0, 0, 1))
    if table.dim() == 2:
        return table[labels]
    heads = torch.arange(len(table), device=table.device)
    return table[heads[:, None, None], labels]


def _allowed(logits: Tensor, inputs: Inputs) -> Tensor:
    i, j = _positions(inputs)
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if inputs.is_causal:
        allowed = allowed & (j <= i)[:, None]
    if inputs.key_lengths is not None:
        allowed = allowed & (j < inputs.key_lengths[:, None])[:, None, None]
    if inputs.attn_mask is not None:
        mask = inputs.attn_mask
        allowed = allowed & (mask if mask.dtype == torch.bool else mask != float("-inf"))
    return allowed


def _softmax(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    allowed = _allowed(logits, inputs)
    if inputs.attn_mask is not None and inputs.attn_mask.dtype != torch.bool:
        logits = logits + torch.where(allowed, inputs.attn_mask.to(logits.dtype), 0)
    has_key = allowed.any(-1, keepdim=True)
    # a query without a key is worked out as if it had all, then replaced, so that no gradient is NaN
    logits = torch.where(allowed | ~has_key, logits, float("-inf"))
    lse = torch.logsumexp(logits, -1, keepdim=True)
    # and not exp(logits - lse): where masks hold large numbers, lse has lost the logarithm of the sum
    weights = torch.where(has_key, torch.softmax(logits, -1), 0)
    return weights, torch.where(has_key, lse, float("-inf")).squeeze(-1)
