"""Checks of the modules' arguments: sizes, probabilities, sequences, caches.

Each check uses the caller's name for the argument. So a layer checks its arguments itself, before it calls
its attention, which has other names for them.
"""

from enum import Enum
from typing import Final

import torch
from torch import Tensor

from relpos._inputs import FLOAT_DTYPES
from relpos._positions import INT_TYPES, two_sides


class Required(Enum):
    """The default of an argument without a default: our error, unlike Python's, says what to give."""

    REQUIRED = "required"

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Final = Required.REQUIRED


def sides_of(owner: object, max_distance: int | tuple[int, int] | Required | None) -> tuple[int, int] | None:
    """The max_distance of a module as (left, right), or None for no relative positions.

    Raises:
        TypeError: max_distance is missing or no distance. ValueError: it is negative.
    """
    if max_distance is REQUIRED:
        raise TypeError(
            f"max_distance must be given to {type(owner).__name__}: an integer k, or two integers "
            "(left, right), in tokens, beyond which distances share one row. "
            "Give max_distance=None for no relative positions, as in cross-attention."
        )
    return two_sides(max_distance)


def check_count(name: str, count: object) -> None:
    """Refuse anything but an integer of at least 1."""
    if isinstance(count, bool) or not isinstance(count, INT_TYPES):
        raise TypeError(f"{name} must be an integer; got {type(count).__name__}. Give a whole number.")
    if count < 1:
        raise ValueError(f"{name} must be at least 1; got {count}. Give a larger one.")


def check_heads(
    width: int, num_heads: int, *, width_name: str = "embed_dim", heads_name: str = "num_heads"
) -> None:
    """Refuse a number of heads that does not divide the width."""
    check_count(width_name, width)
    check_count(heads_name, num_heads)
    if width % num_heads:
        raise ValueError(
            f"{heads_name} must divide {width_name} = {width}; got {num_heads}. Change one of them."
        )


def check_probability(name: str, p: object) -> None:
    """Refuse anything but a number from 0 to 1."""
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(p).__name__}. It is a probability.")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1; got {p}. It is a probability.")


def check_sequence(
    name: str, x: Tensor, weight: Tensor, *, width: int, width_name: str, batch_first: bool
) -> None:
    """Refuse anything but [batch, length, width] or [length, width] with the dtype and device of `weight`."""
    _check_tensor(name, x)
    if x.dim() not in (2, 3):
        batched = "[batch, length, " if batch_first else "[length, batch, "
        raise ValueError(
            f"{name} must be {batched}{width_name}] or [length, {width_name}]; got {list(x.shape)}. "
            f"batch_first={batch_first} sets the order of dimensions."
        )
    if x.shape[-1] != width:
        raise ValueError(
            f"{name} must have the width {width_name} = {width}; got {x.shape[-1]}. "
            "Check the layer before, or the sizes of this module."
        )
    if x.device != weight.device:
        raise ValueError(
            f"{name} must be on the device of the weights = {weight.device}; got {x.device}. "
            "Move one of them with .to()."
        )
    if x.dtype not in FLOAT_DTYPES or (x.dtype != weight.dtype and not _is_autocast(x)):
        raise TypeError(
            f"{name} must have the dtype of the weights = {weight.dtype}; got {x.dtype}. "
            "Convert one of them with .to(), or use autocast."
        )


def check_together(
    name: str, x: Tensor, other_name: str, other: Tensor, *, batch_first: bool, has_one_length: bool = False
) -> None:
    """Refuse `x` if its batch differs from that of `other`, or only one of them has a batch.

    Args:
        has_one_length: whether the lengths must be equal, too.
    """
    for some_name, some in ((other_name, other), (name, x)):
        _check_tensor(some_name, some)
    if x.dim() != other.dim():
        raise ValueError(
            f"{name} must have as many dimensions as {other_name} = {other.dim()}; got {x.dim()}. "
            "Give two batches, or two single sequences."
        )
    batch_at, length_at = (0, 1) if batch_first else (1, 0)
    if x.dim() == 3 and x.shape[batch_at] != other.shape[batch_at]:
        raise ValueError(
            f"{name} must have the batch of {other_name} = {other.shape[batch_at]}; got {x.shape[batch_at]}. "
            f"batch_first={batch_first} sets which dimension is the batch."
        )
    length_at = length_at if x.dim() == 3 else 0
    if has_one_length and x.shape[length_at] != other.shape[length_at]:
        raise ValueError(
            f"{name} must have the length of {other_name} = {other.shape[length_at]}; "
            f"got {x.shape[length_at]}. Each key has one value."
        )


def check_dense(name: str, x: Tensor, advice: str) -> None:
    """Refuse nested and sparse tensors."""
    if x.is_nested or x.layout != torch.strided:
        found = f"a nested one of layout {x.layout}" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense tensor; got {found}. {advice}")


def check_flag(name: str, flag: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False; got {type(flag).__name__}. Give a bool.")


def check_cache(name: str, cache: object) -> None:
    """Refuse an object that is no cache, such as the list of caches of a stack."""
    if cache is not None and not hasattr(cache, "filled_memory"):
        raise TypeError(
            f"{name} must be a cache of one attention module; got {type(cache).__name__}. "
            "Make one with make_cache(). A stack takes a list, as `caches`."
        )


def check_caches(name: str, caches: object, num_layers: int) -> None:
    """Refuse anything but a list with one cache per layer, no cache twice."""
    if caches is None:
        return
    if not isinstance(caches, (list, tuple)):
        raise TypeError(
            f"{name} must be a list of caches; got {type(caches).__name__}. Make one with make_caches()."
        )
    if len(caches) != num_layers:
        raise ValueError(
            f"{name} must have one cache for each layer = {num_layers}; got {len(caches)}. "
            "Make them with make_caches()."
        )
    for index, cache in enumerate(caches):
        check_cache(f"{name}[{index}]", cache)
        for earlier in range(index):
            # compares identity: a shared cache mixes the tokens of two layers
            if cache is not None and cache is caches[earlier]:
                raise ValueError(
                    f"{name}[{index}] must be a cache of its own; got the cache of {name}[{earlier}]. "
                    "Make them with make_caches()."
                )


def refuse_appended_keys(add_bias_kv: bool, add_zero_attn: bool) -> None:
    """Refuse the two options of torch.nn that append a key."""
    for name, is_asked in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
        if is_asked:
            raise ValueError(
                f"{name} must be False, since a key appended to all others has no position; got {is_asked}. "
                "Leave it out, or use torch.nn.MultiheadAttention."
            )


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}. Make it a tensor.")
    check_dense(name, x, "Pad it, and give a padding mask.")


def _is_autocast(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
