"""Which pairs may attend: causal, key lengths and dense masks, and how they combine.

Everything here is [1 or batch, 1 or heads, 1 or query, 1 or key]: a mask is only as large as what it says.
"""

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, query_start: int | Tensor, device: torch.device) -> Tensor:
    """True where key j is not after query i, j <= query_start + i: bool [1 or batch, 1, query, key]."""
    i = torch.arange(num_queries, device=device)
    j = torch.arange(num_keys, device=device)
    if isinstance(query_start, Tensor):
        i = query_start[:, None, None] + i  # [batch, 1, query]
    else:
        i = (i + query_start)[None, None]  # [1, 1, query]
    return j <= i[..., None]


def key_mask(key_lengths: Tensor, num_keys: int) -> Tensor:
    """True where key j exists, j < key_lengths: bool [batch, 1, 1, key]."""
    j = torch.arange(num_keys, device=key_lengths.device)
    return j < key_lengths[:, None, None, None]


def combine_masks(
    num_queries: int,
    num_keys: int,
    query_start: int | Tensor,
    *,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Everything that limits attention as (allowed, additive).

    Args:
        attn_mask: four dimensions, bool (True = may attend) or float (added to the logits).
    Returns:
        allowed: bool, the conjunction of what is boolean, or None where all may attend.
        additive: the float mask as it came, or None.
    """
    parts: list[Tensor] = []
    additive = None
    if key_lengths is not None:
        parts.append(key_mask(key_lengths, num_keys))
    if is_causal:
        parts.append(causal_mask(num_queries, num_keys, query_start, device))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        parts.append(attn_mask)
    elif attn_mask is not None:
        additive = attn_mask
    allowed = None
    for part in parts:
        allowed = part if allowed is None else allowed & part
    return allowed, additive


def merge_masks(
    allowed: Tensor | None, additive: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as one float mask, and the queries that it leaves without a key.

    Returns:
        bias: added to the logits; -inf where a pair may not attend, but 0 all along a query without a key, so
            that its softmax is finite and the caller can put zeros in its place. None where there is no mask.
        is_empty: bool [1 or batch, 1 or heads, 1 or query, 1], True for a query without a key.
    """
    if allowed is None and additive is None:
        return None, None
    if additive is None:
        assert allowed is not None
        is_empty = ~allowed.any(-1, keepdim=True)
        bias = torch.zeros_like(allowed, dtype=dtype)
        return bias.masked_fill_(~(allowed | is_empty), float("-inf")), is_empty
    bias = additive.to(dtype)
    if allowed is not None:
        bias = bias.masked_fill(~allowed, float("-inf"))
    is_empty = (bias == float("-inf")).all(-1, keepdim=True)
    return bias.masked_fill(is_empty, 0.0), is_empty
