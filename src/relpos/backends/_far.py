"""Attention to keys so far from the query that one row of the tables serves them all: torch's fused kernel.

A far region is all keys up to a diagonal, or all keys from a diagonal on. The kernel takes rectangles, and
triangles below the diagonal, so a region is at most one of each; what lies above a diagonal is turned round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Some queries in a row, some keys in a row, and which of their pairs count.

    Args:
        is_triangle: query i counts keys 0 to i only, or, with is_reversed, the last query the last key only,
            the one before it the last two, and so on.
    """

    queries: slice
    keys: slice
    is_triangle: bool = False
    is_reversed: bool = False


def until(num_queries: int, num_keys: int, offset: int) -> list[Part]:
    """The pairs with j <= i + offset, each in one part; every query of a part has a key in it."""
    everyone = slice(0, num_queries)
    # the keys that any query sees
    last = min(num_keys, num_queries + offset)
    if offset >= num_keys - 1:
        return [Part(everyone, slice(0, num_keys))]
    if offset < 0:
        return [Part(slice(-offset, num_queries), slice(0, last), is_triangle=True)] if last > 0 else []
    rectangle = [Part(everyone, slice(0, offset))] if offset > 0 else []
    return [*rectangle, Part(everyone, slice(offset, last), is_triangle=True)]


def since(num_queries: int, num_keys: int, offset: int) -> list[Part]:
    """The pairs with j >= i + offset, each in one part: those of `until`, seen from the other end."""

    def turned(x: slice, length: int) -> slice:
        return slice(length - x.stop, length - x.start)

    return [
        Part(
            turned(part.queries, num_queries), turned(part.keys, num_keys), part.is_triangle, is_reversed=True
        )
        for part in until(num_queries, num_keys, num_keys - num_queries - offset)
    ]


def attend(part: Part, tensors: QKV, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of plain attention over one part, for the queries that it has.

    Args:
        tensors: query, key and value, [batch, heads, length, dim] with one dim for all three, in one dtype.
    """
    query, key, value = _of(part, *tensors)
    out, lse = _forward(query, key, value, 0.0, part.is_triangle, scale=scale)
    return _turned(part, out), _turned(part, lse)


def add_gradients(
    part: Part, grad_out: Tensor, tensors: QKV, out: Tensor, lse: Tensor, scale: float, totals: QKV
) -> None:
    """Add the gradients of query, key and value from one part to `totals`.

    Args:
        out, lse: of the whole attention, less what one row of the tables adds in this part, so that the
            kernel finds each weight, and its gradient, as it is in the whole.
    """
    query, key, value = _of(part, *tensors)
    grad_out, out, lse = (_turned(part, x[:, :, part.queries]) for x in (grad_out, out, lse))
    grads = _backward(_dense_rows(grad_out), query, key, value, out, lse, 0.0, part.is_triangle, scale=scale)
    for total, grad, rows in zip(totals, grads, (part.queries, part.keys, part.keys), strict=True):
        total[:, :, rows].add_(_turned(part, grad))


def _of(part: Part, query: Tensor, key: Tensor, value: Tensor) -> QKV:
    key, value = (_dense_rows(_turned(part, x[:, :, part.keys])) for x in (key, value))
    return _dense_rows(_turned(part, query[:, :, part.queries])), key, value


def _turned(part: Part, x: Tensor) -> Tensor:
    """The last query or key first where the kernel needs it so."""
    return x.flip(2) if part.is_triangle and part.is_reversed else x


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel reads the numbers of one token side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
