"""Checks of query, key, value and the tables: kinds, layouts, devices, dtypes and shapes."""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_kinds(
    query: Tensor, key: Tensor, value: Tensor, rel_k: Tensor | None, rel_v: Tensor | None
) -> None:
    named = {"query": query, "key": key, "value": value, "rel_k": rel_k, "rel_v": rel_v}
    for name, x in named.items():
        is_table = name.startswith("rel_")
        if x is None and is_table:
            continue
        if not isinstance(x, Tensor):
            wanted = "a tensor or None" if is_table else "a tensor"
            raise TypeError(f"{name} must be {wanted}; got {kind_of(x)}. Make it a tensor.")
        check_layout(name, x, "Pad it, and give key_lengths if it is ragged.")
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16; got {x.dtype}. Convert it with .to()."
            )
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query = {query.device}; got {x.device}. Move it with .to()."
            )


def check_layout(name: str, x: Tensor, advice: str = "Convert it with .to_dense().") -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}. {advice}")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got a nested one. {advice}")


def cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, [batch, heads, length, dim]; got {sizes_of(x)}. "
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


def check_table(name: str, table: Tensor | None, heads: int, width_name: str, width: int) -> None:
    if table is None:
        return
    if table.dim() not in (2, 3):
        raise ValueError(
            f"{name} must be [labels, {width_name}] or [heads, labels, {width_name}]; got {sizes_of(table)}. "
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


def can_look_at(x: Tensor) -> bool:
    """Whether values may steer Python: not where that waits for a device or breaks a graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    # a fake tensor, which has no values, is a subclass
    return type(x) is Tensor and x.device.type == "cpu"


def kind_of(x: object) -> str:
    """The type of x by its full name, unless it is Python's own: numpy.bool is not bool."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def sizes_of(x: Tensor) -> list[int]:
    return list(x.shape)
