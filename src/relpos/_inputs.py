"""Every argument of attention in one object, checked.

The one place where shapes, dtypes, devices, ranges and combinations are looked at: what leaves `check` is
right, so backends and the reference ask no questions.
"""

import math
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos.positions import FARTHEST, INT_TYPES, resolve_max_distance, two_sides

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Inputs:
    """The arguments of `relative_attention` or `relation_attention`, normalised; see there for meanings.

    Where `relations` holds the row of each pair, or -1 for none, distances mean nothing: `left` is 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None
    left: int
    right: int
    query_start: int | Tensor
    attn_mask: Tensor | None  # always four dimensions
    key_lengths: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    return_lse: bool
    relations: Tensor | None = None  # always four dimensions

    @property
    def num_labels(self) -> int:
        """Rows of the tables."""
        return self.left + self.right + 1

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head; 1 for plain multi-head attention."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 where a tensor is float64: the dtype in which sums are kept."""
        tensors = (self.query, self.key, self.value, self.rel_k, self.rel_v)
        is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
        return torch.float64 if is_double else torch.float32


def check(
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
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Inputs:
    """The arguments as one object.

    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
    """
    _check_kinds(query, key, value, rel_k, rel_v)
    _check_shapes(query, key, value)
    _check_table("rel_k", rel_k, query.shape[1], "d_k", query.shape[3])
    _check_table("rel_v", rel_v, query.shape[1], "d_v", value.shape[3])
    left, right = resolve_max_distance(
        max_distance,
        None if rel_k is None else rel_k.shape[-2],
        None if rel_v is None else rel_v.shape[-2],
    )
    query, key, value = _cast(query, key, value)
    return Inputs(
        query=query,
        key=key,
        value=value,
        rel_k=rel_k,
        rel_v=rel_v,
        left=left,
        right=right,
        query_start=_checked_start(query_start, query, key),
        attn_mask=_checked_mask(attn_mask, query, key),
        key_lengths=_checked_lengths(key_lengths, query, key),
        is_causal=_checked_flag("is_causal", is_causal),
        dropout_p=_checked_dropout(dropout_p),
        scale=_checked_scale(scale, query.shape[3]),
        return_lse=_checked_flag("return_lse", return_lse),
    )


def check_relations(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relations: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Inputs:
    """The arguments of `relation_attention` as one object.

    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
    """
    _check_kinds(query, key, value, rel_k, rel_v)
    _check_shapes(query, key, value)
    _check_table("rel_k", rel_k, query.shape[1], "d_k", query.shape[3])
    _check_table("rel_v", rel_v, query.shape[1], "d_v", value.shape[3])
    labels = [None if x is None else x.shape[-2] for x in (rel_k, rel_v)]
    if None not in labels and labels[0] != labels[1]:
        raise ValueError(
            f"rel_v must have as many rows as rel_k = {labels[0]}; got {labels[1]}. "
            "Both tables have one row for each label."
        )
    num_labels = labels[1] if labels[0] is None else labels[0]
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        max_distance=None if num_labels is None else (0, num_labels - 1),
        query_start=0,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
    )
    return replace(inputs, relations=_checked_relations(relations, num_labels, query, key))


def check_by_distance(
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
        raise TypeError(f"x must be a tensor; got {_kind(x)}. Make it a tensor.")
    _check_layout("x", x)
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"x must be float64, float32, bfloat16 or float16; got {x.dtype}. Convert it with .to()."
        )
    if x.dim() != 4:
        raise ValueError(
            f"x must have 4 dimensions, [batch, heads, query, key]; got {_sizes(x)}. "
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
    _checked_start(query_start, x, x.mT, "x")
    if where is not None:
        if not isinstance(where, Tensor):
            raise TypeError(f"where must be a bool tensor or None; got {_kind(where)}. Make it a tensor.")
        if where.dtype != torch.bool:
            raise TypeError(
                f"where must be a bool tensor or None; got {where.dtype}. Convert it with .bool()."
            )
        if where.device != x.device:
            raise ValueError(
                f"where must be on the device of x = {x.device}; got {where.device}. Move it with .to()."
            )
        _in_four_dimensions("where", where, x, x.mT)  # x.mT has as many rows as there are keys
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}. Give one of these.")
    return sides


def can_look_at(x: Tensor) -> bool:
    """Whether values may steer Python: not where that waits for a device or breaks a graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    # a fake tensor, which has no values, is a subclass
    return type(x) is Tensor and x.device.type == "cpu"


def _check_kinds(
    query: Tensor, key: Tensor, value: Tensor, rel_k: Tensor | None, rel_v: Tensor | None
) -> None:
    named = {"query": query, "key": key, "value": value, "rel_k": rel_k, "rel_v": rel_v}
    for name, x in named.items():
        is_table = name.startswith("rel_")
        if x is None and is_table:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} must be a tensor{' or None' if is_table else ''}; got {_kind(x)}. Make it a tensor."
            )
        _check_layout(name, x, "Pad it, and give key_lengths if it is ragged.")
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16; got {x.dtype}. Convert it with .to()."
            )
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query = {query.device}; got {x.device}. Move it with .to()."
            )


def _check_layout(name: str, x: Tensor, advice: str = "Convert it with .to_dense().") -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}. {advice}")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got a nested one. {advice}")


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the dtype of autocast, but for float64, as for `scaled_dot_product_attention`."""
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            x if x.dtype in (dtype, torch.float64) else x.to(dtype) for x in (query, key, value)
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query = {query.dtype}; got {x.dtype}. "
                "Convert it with .to(), or use autocast, which converts all but float64."
            )
    return query, key, value


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, [batch, heads, length, dim]; got {_sizes(x)}. "
                "Split the heads, and add a batch of one if there is none."
            )
    batch, heads, _, d_k = query.shape
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != batch:
            raise ValueError(f"{name} must have the batch of query = {batch}; got {x.shape[0]}. Expand it.")
    if key.shape[3] != d_k:
        raise ValueError(
            f"key must have the width d_k of query = {d_k}; got {key.shape[3]}. Check the projections."
        )
    if d_k == 0:
        raise ValueError("query must have a width d_k of at least 1; got 0. Check the projections.")
    if value.shape[1] != key.shape[1]:
        raise ValueError(
            f"value must have the heads of key = {key.shape[1]}; got {value.shape[1]}. "
            "Check how the heads are split."
        )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value must have the length of key = {key.shape[2]}; got {value.shape[2]}. "
            "Each key stands for one value."
        )
    if heads == 0 or key.shape[1] == 0 or heads % key.shape[1] != 0:
        raise ValueError(
            f"key must have a number of heads that divides the heads of query = {heads}; got {key.shape[1]}. "
            "Check how the heads are split."
        )


def _check_table(name: str, table: Tensor | None, heads: int, width_name: str, width: int) -> None:
    if table is None:
        return
    if table.dim() not in (2, 3):
        raise ValueError(
            f"{name} must be [labels, {width_name}] or [heads, labels, {width_name}]; got {_sizes(table)}. "
            "Leave out the batch."
        )
    if table.dim() == 3 and table.shape[0] != heads:
        raise ValueError(
            f"{name} must have one table for each head of query = {heads}; got {table.shape[0]}. "
            f"Give [labels, {width_name}] to share one table."
        )
    if table.shape[-1] != width:
        source = "query" if width_name == "d_k" else "value"
        raise ValueError(
            f"{name} must have the width {width_name} of {source} = {width}; got {table.shape[-1]}. "
            "Tables are as wide as one head."
        )
    if table.shape[-2] == 0:
        raise ValueError(f"{name} must have at least 1 row; got 0. Give None for no table.")


def _checked_start(
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
            f"query_start must be an integer or an integer tensor [batch]; got {_kind(query_start)}. "
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


def _checked_lengths(key_lengths: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if key_lengths is None:
        return None
    if not isinstance(key_lengths, Tensor):
        raise TypeError(
            f"key_lengths must be an integer tensor [batch] or None; got {_kind(key_lengths)}. "
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
    _check_layout(name, x)
    if x.dtype not in INT_DTYPES:
        raise TypeError(f"{name} must be a tensor of integers; got {x.dtype}. Convert it with .long().")
    if x.dim() != 1 or x.shape[0] != query.shape[0]:
        raise ValueError(
            f"{name} must be [batch] = [{query.shape[0]}]; got {_sizes(x)}. "
            "Give one number for each sequence."
        )
    if x.device != query.device:
        raise ValueError(
            f"{name} must be on the device of {query_name} = {query.device}; got {x.device}. "
            "Move it with .to()."
        )


def _checked_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None; got {_kind(attn_mask)}. Make it a tensor.")
    _check_layout("attn_mask", attn_mask)
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
    return _in_four_dimensions("attn_mask", attn_mask, query, key)


def _checked_relations(relations: Tensor, num_labels: int | None, query: Tensor, key: Tensor) -> Tensor:
    if not isinstance(relations, Tensor):
        raise TypeError(
            f"relations must be a tensor of integers; got {_kind(relations)}. "
            "Make it a tensor; `Relations` have theirs as .labels."
        )
    _check_layout("relations", relations)
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
    relations = _in_four_dimensions("relations", relations, query, key)
    if relations.numel():
        _check_labels(relations, num_labels)
    return relations


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


def _in_four_dimensions(name: str, x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """x as [1 or batch, 1 or heads, 1 or query, 1 or key]."""
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    is_wrong = x.dim() > 4
    if not is_wrong and x.dim() > 0:
        pairs = zip(x.shape, wanted[4 - x.dim() :], strict=True)
        is_wrong = any(size != 1 and size != want for size, want in pairs)
    if is_wrong:
        raise ValueError(
            f"{name} must be broadcastable to [batch, heads, query, key] = {list(wanted)}; "
            f"got {_sizes(x)}. Unsqueeze the dimensions that it is shared over: of [batch, query, key] give "
            f"{name}[:, None]."
        )
    return x[(None,) * (4 - x.dim())]


def _checked_dropout(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float, torch.SymFloat)):
        raise TypeError(f"dropout_p must be a number; got {_kind(dropout_p)}. It is a probability.")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1; got {dropout_p}. It is a probability.")
    return dropout_p


def _checked_scale(scale: float | None, d_k: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d_k)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"scale must be a number or None; got {_kind(scale)}. Multiply query by what is learned."
        )
    # while torch traces, numbers may be symbols
    is_number = not torch.compiler.is_compiling() and isinstance(scale, (int, float))
    if is_number and not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale must be finite; got {scale}. Leave it out for 1 / sqrt(d_k).")
    return scale


def _checked_flag(name: str, flag: bool) -> bool:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False; got {_kind(flag)}. Give a bool.")
    return flag


def _kind(x: object) -> str:
    """The type of x by its full name, unless it is Python's own: numpy.bool is not bool."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _sizes(x: Tensor) -> list[int]:
    return list(x.shape)
