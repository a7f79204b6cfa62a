"""Masks of keys as transformers gives them, where 1 = keep: checks, and conversion to one mask."""

import torch
from torch import Tensor


def check_key_mask(
    name: str, mask: Tensor | None, *, batch: int, num_queries: int, num_keys: int | None, is_source: bool
) -> None:
    """Refuse a mask that `key_mask` cannot use.

    Args:
        name: the caller's name for the mask.
        num_keys: number of keys, tokens; None if it is known only when a compiled graph runs.
        is_source: whether the keys are those of the source; the mask of a target may be longer.
    Raises:
        ValueError: the mask has another rank or size. TypeError: it is no tensor.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor or None; got {type(mask).__name__}. Make it a tensor.")
    # sizes become text in errors only: torch.compile would make a graph for each
    keys = "..." if num_keys is None else num_keys
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"{name} must be [batch, key] = [{batch}, {keys}], or [batch, heads, query, key]; got "
            f"{list(mask.shape)}. Give 1 for tokens and 0 for padding, cached tokens included."
        )
    length = mask.shape[-1]
    is_wrong = num_keys is not None and (length != num_keys if is_source else length < num_keys)
    # "or" and not "|", since torch.jit.trace has sizes as tensors
    is_wrong = is_wrong or (mask.dim() == 4 and mask.shape[2] not in (1, num_queries))
    if is_wrong or mask.shape[0] not in (1, batch):
        wanted = f"[batch, key] = [{batch}, {keys}]"
        if mask.dim() == 4:
            wanted = f"[batch, heads, query, key] = [{batch}, ..., {num_queries}, {keys}]"
        advice = "Mask all its tokens." if is_source else "It covers cached tokens too."
        raise ValueError(f"{name} must be {wanted}; got {list(mask.shape)}. {advice}")


def key_mask(mask: Tensor | None) -> Tensor | None:
    """The mask of transformers as one of `relative_attention`, where True = may attend, or added if float.

    Args:
        mask: [batch, key], 1 = keep; or [batch, heads or 1, query, key], bool or integer likewise, or float,
            added to the logits.
    Returns:
        [batch, 1, 1, key] or the mask of four dimensions; None for None.
    """
    if mask is None:
        return None
    if mask.dim() == 2:
        return (mask != 0)[:, None, None]
    return mask if mask.dtype == torch.bool or mask.is_floating_point() else mask != 0


def seen_by_any(mask: Tensor | None) -> Tensor | None:
    """The mask of a source for the target: of a mask of four dimensions, the keys that any query sees."""
    if mask is None or mask.dim() != 4 or mask.shape[2] == 1:
        return mask
    return mask.amax(2, keepdim=True) if mask.is_floating_point() else (mask != 0).any(2, keepdim=True)
