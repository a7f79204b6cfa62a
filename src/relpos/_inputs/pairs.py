"""Checks of what each pair of query and key has one of: whether it may attend, and its label."""

import torch
from torch import Tensor

from relpos._inputs.tensors import FLOAT_DTYPES, INT_DTYPES, can_look_at, check_layout, kind_of, sizes_of


def checked_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None; got {kind_of(attn_mask)}. Make it a tensor.")
    check_layout("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"attn_mask must be bool (True = may attend) or float (added to the logits); "
            f"got {attn_mask.dtype}. Give mask != 0 where 1 = may attend, and mask == 0 where 1 = hidden."
        )
    if attn_mask.device != query.device:
        raise ValueError(
            f"attn_mask must be on the device of query = {query.device}; got {attn_mask.device}. "
            "Move it with .to()."
        )
    return in_four_dimensions("attn_mask", attn_mask, query, key)


def checked_relations(relations: Tensor, num_labels: int | None, query: Tensor, key: Tensor) -> Tensor:
    if not isinstance(relations, Tensor):
        raise no_labels(relations)
    check_layout("relations", relations)
    if relations.dtype not in INT_DTYPES:
        raise TypeError(
            f"relations must be a tensor of integers, labels from 0 and -1 for none; got {relations.dtype}. "
            "Convert it with .long()."
        )
    if relations.device != query.device:
        raise ValueError(
            f"relations must be on the device of query = {query.device}; got {relations.device}. "
            "Move it with .to()."
        )
    relations = in_four_dimensions("relations", relations, query, key)
    if relations.numel():
        _check_labels(relations, num_labels)
    return relations


def no_labels(relations: object) -> TypeError:
    """The error of relations that are no tensor."""
    return TypeError(
        f"relations must be a tensor of integers; got {kind_of(relations)}. "
        "Make it a tensor; `Relations` have theirs as .labels."
    )


def _check_labels(relations: Tensor, num_labels: int | None) -> None:
    """Refuse labels that no row has; where they cannot be looked at, the device does it later."""
    highest = "" if num_labels is None else f" and at most {num_labels - 1}, the last row of the tables"
    rule = f"relations must be at least -1, which is no relation,{highest}"
    # -1 would wrap in a dtype without a sign
    is_wrong = relations < (-1 if relations.dtype.is_signed else 0)
    if num_labels is not None:
        # as int64, since there may be more rows than the dtype of relations can count
        is_wrong = is_wrong | (relations.long() >= num_labels)
    if can_look_at(relations):
        if is_wrong.any():
            raise ValueError(f"{rule}; got {relations[is_wrong][0].item()}. Check how pairs are labelled.")
    elif not (torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()):
        torch._assert_async(~is_wrong.any(), f"{rule}. Check how pairs are labelled.")


def in_four_dimensions(name: str, x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """x as [1 or batch, 1 or heads, 1 or query, 1 or key]."""
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    is_wrong = x.dim() > 4
    if not is_wrong and x.dim() > 0:
        pairs = zip(x.shape, wanted[4 - x.dim() :], strict=True)
        is_wrong = any(size != 1 and size != want for size, want in pairs)
    if is_wrong:
        raise ValueError(
            f"{name} must be broadcastable to [batch, heads, query, key] = {list(wanted)}; "
            f"got {sizes_of(x)}. Unsqueeze the dimensions that it is shared over: of [batch, query, key] "
            f"give {name}[:, None]."
        )
    return x[(None,) * (4 - x.dim())]
