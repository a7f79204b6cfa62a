"""Checks of what each sequence has one of: the position of its first query, and its number of keys."""

import torch
from torch import Tensor

from relpos._inputs.tensors import INT_DTYPES, can_look_at, check_layout, kind_of, sizes_of
from relpos._positions import FARTHEST, INT_TYPES


def checked_start(
    query_start: int | Tensor | None, query: Tensor, key: Tensor, name: str = "query"
) -> int | Tensor:
    if query_start is None:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"query_start must be given unless query and key have one length; "
                f"got lengths {query.shape[2]} and {key.shape[2]}. "
                "Give the position of the first query among the keys. "
                "Cross-attention has no relative positions."
            )
        return 0
    check_start(query_start, query, name)
    return query_start


def check_start(query_start: int | Tensor, query: Tensor, name: str = "query") -> None:
    """Refuse what is no position of the first query among the keys.

    Args:
        query: [batch, ...], for the batch and the device; an error calls it `name`.
    Raises:
        ValueError: a shape, device or number is wrong. TypeError: it is no integer, nor a tensor of them.
    """
    if isinstance(query_start, Tensor):
        _check_batch_integers("query_start", query_start, query, name)
        if can_look_at(query_start):
            is_outside = (query_start.long() < -FARTHEST) | (query_start.long() > FARTHEST)
            if is_outside.any():
                raise _outside(query_start[is_outside][0].item())
        return
    if isinstance(query_start, bool) or not isinstance(query_start, INT_TYPES):
        raise TypeError(
            f"query_start must be an integer or an integer tensor [batch]; got {kind_of(query_start)}. "
            "It is the position of the first query among the keys."
        )
    # while torch traces, numbers may be symbols
    if not torch.compiler.is_compiling() and type(query_start) is int and abs(query_start) > FARTHEST:
        raise _outside(query_start)


def _outside(query_start: int | float) -> ValueError:
    return ValueError(
        f"query_start must be between -2**62 and 2**62; got {query_start}. "
        "It is the position of the first query among the keys."
    )


def checked_lengths(key_lengths: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if key_lengths is None:
        return None
    if not isinstance(key_lengths, Tensor):
        raise TypeError(
            f"key_lengths must be an integer tensor [batch] or None; got {kind_of(key_lengths)}. "
            "Make it a tensor."
        )
    _check_batch_integers("key_lengths", key_lengths, query)
    num_keys = key.shape[2]
    if can_look_at(key_lengths):
        # as int64, since a length may be too large for the dtype of key_lengths
        is_outside = (key_lengths.long() < 0) | (key_lengths.long() > num_keys)
        if is_outside.any():
            raise ValueError(
                f"key_lengths must be between 0 and the length of key = {num_keys}; "
                f"got {key_lengths[is_outside][0].item()}. It counts the keys that exist."
            )
    return key_lengths


def _check_batch_integers(name: str, x: Tensor, query: Tensor, query_name: str = "query") -> None:
    check_layout(name, x)
    if x.dtype not in INT_DTYPES:
        raise TypeError(f"{name} must be a tensor of integers; got {x.dtype}. Convert it with .long().")
    if x.dim() != 1 or x.shape[0] != query.shape[0]:
        raise ValueError(
            f"{name} must be [batch] = [{query.shape[0]}]; got {sizes_of(x)}. "
            "Give one number for each sequence."
        )
    if x.device != query.device:
        raise ValueError(
            f"{name} must be on the device of {query_name} = {query.device}; got {x.device}. "
            "Move it with .to()."
        )
