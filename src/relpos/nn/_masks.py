"""Masks as in torch.nn, where True = hidden: checks, and conversion to one mask for `relative_attention`.

`relpos._masks` handles the masks of `relative_attention`, where True = may attend, as in SDPA.
"""

import torch
from torch import Tensor

from relpos._inputs import FLOAT_DTYPES
from relpos.nn._arguments import check_dense


def check_masks(
    names: tuple[str, str],
    masks: tuple[Tensor | None, Tensor | None],
    *,
    query: Tensor,
    batch_first: bool,
    num_heads: int,
    num_keys: tuple[int, ...],
    has_cache: bool,
) -> None:
    """Refuse masks whose dtype, device or shape does not fit query and keys.

    Args:
        names, masks: attn_mask and key_padding_mask, with the caller's names for them.
        query: with or without a batch.
        num_keys: the key lengths that a mask may have, in tokens.
        has_cache: whether these lengths include tokens in a cache.
    """
    advice = "Check the sizes and their order."
    if has_cache:
        advice = "With a cache, `key` counts all tokens in it."
    attn_mask, key_padding_mask = masks
    for name, mask, meaning in zip(names, masks, ("hidden", "padding"), strict=True):
        if mask is not None:
            _check_kind(name, mask, meaning, query)
    num_queries, batch = query.shape[0], None
    if query.dim() == 3:
        batch, num_queries = query.shape[:2] if batch_first else query.shape[1::-1]
    if attn_mask is not None:
        all_heads, plan = num_heads, "[heads, query, key]"
        if batch is not None:
            all_heads, plan = batch * num_heads, "[batch * heads, query, key]"
        sizes = [[num_queries, keys] for keys in num_keys]
        _check_shape(
            names[0],
            attn_mask,
            advice,
            ("[query, key]", sizes),
            (plan, [[all_heads, *size] for size in sizes]),
        )
    if key_padding_mask is not None:
        plan = "[key]" if batch is None else "[batch, key]"
        _check_shape(
            names[1],
            key_padding_mask,
            advice,
            (plan, [[keys] if batch is None else [batch, keys] for keys in num_keys]),
        )


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, *, batch: int, num_heads: int
) -> Tensor | None:
    """Merge the two masks of torch.nn (bool: True = hidden) into one of SDPA (bool: True = may attend).

    Args:
        attn_mask: [query, key] or [batch * heads, query, key].
        key_padding_mask: [batch, key], or [key].
    Returns:
        Broadcastable to [batch, heads, query, key]; float if either mask is float; None if both are None.
    """
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (batch, num_heads))
    masks = [
        attn_mask,
        None if key_padding_mask is None else torch.atleast_2d(key_padding_mask)[:, None, None],
    ]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    if all(mask.dtype == torch.bool for mask in given):
        hidden = given[0] if len(given) == 1 else given[0] | given[1]
        return ~hidden
    dtype = next(mask.dtype for mask in given if mask.dtype != torch.bool)
    added = [
        torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask
        for mask in given
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _check_kind(name: str, mask: Tensor, meaning: str, query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor or None; got {type(mask).__name__}. Make it a tensor.")
    check_dense(name, mask, "Convert it with .to_dense(), or pad it if it is nested.")
    if mask.dtype != torch.bool and mask.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be bool (True = {meaning}) or float (added to the logits); got {mask.dtype}. "
            f"Give mask == 0 if 1 = keep, as in Hugging Face's masks, or mask != 0 if 1 = {meaning}."
        )
    if mask.device != query.device:
        raise ValueError(
            f"{name} must be on the device of the tokens = {query.device}; got {mask.device}. "
            "Move it with .to()."
        )


def _check_shape(name: str, mask: Tensor, advice: str, *allowed: tuple[str, list[list[int]]]) -> None:
    for _, sizes in allowed:
        if any(list(mask.shape) == size for size in sizes):
            return
    wanted = " or ".join(f"{plan} = {' or '.join(map(str, sizes))}" for plan, sizes in allowed)
    raise ValueError(f"{name} must be {wanted}; got {list(mask.shape)}. {advice}")
