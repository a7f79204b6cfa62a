"""Attention to keys so far from the query that one row of the tables serves them all: a fused kernel.

A far region is all keys up to a diagonal, or all keys from a diagonal on. The kernels take rectangles, and
square triangles below the diagonal, so a region is at most two rectangles and one triangle; what lies above a
diagonal is turned round.
"""

from dataclasses import dataclass

from torch import Tensor

from relpos.backends.merged import sdpa

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Some queries in a row, some keys in a row, and which of their pairs count.

    Args:
        is_triangle: as many queries as keys, of which query i counts keys 0 to i only, or, with is_reversed,
            the last query the last key only, the one before it the last two, and so on.
    """

    queries: slice
    keys: slice
    is_triangle: bool = False
    is_reversed: bool = False


def until(num_queries: int, num_keys: int, offset: int) -> list[Part]:
    """The pairs with j <= i + offset, each in one part; every query of a part has a key in it."""
    if offset >= num_keys - 1:
        return [Part(slice(0, num_queries), slice(0, num_keys))]
    # the first query with a key, and the first key that not every one of them sees
    first, before = max(0, -offset), max(0, offset)
    size = min(num_queries - first, num_keys - before)
    if size <= 0:
        return []
    seeing = slice(first, first + size)
    parts = [Part(seeing, slice(before, before + size), is_triangle=True)]
    if before > 0:
        parts.append(Part(seeing, slice(0, before)))
    if seeing.stop < num_queries:
        # those that see all keys
        parts.append(Part(slice(seeing.stop, num_queries), slice(0, num_keys)))
    return parts


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
    Returns:
        out in that dtype, and lse in float32, of float64 in float64. In 16 bits out is rounded once more than
        the sum over all keys is in the end: by half a unit in its last place, times the weight of the region.
    """
    query, key, value = _of(part, *tensors)
    kernel = sdpa.kernel(query.device, query.dtype)
    out, lse = kernel.forward(query, key, value, part.is_triangle, scale)
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
    kernel = sdpa.kernel(query.device, query.dtype)
    grads = kernel.backward(grad_out, query, key, value, out, lse, part.is_triangle, scale)
    for total, grad, rows in zip(totals, grads, (part.queries, part.keys, part.keys), strict=True):
        total[:, :, rows].add_(_turned(part, grad))


def _of(part: Part, query: Tensor, key: Tensor, value: Tensor) -> QKV:
    key, value = (_turned(part, x[:, :, part.keys]) for x in (key, value))
    return _turned(part, query[:, :, part.queries]), key, value


def _turned(part: Part, x: Tensor) -> Tensor:
    """The last query or key first where the kernels need it so."""
    return x.flip(2) if part.is_triangle and part.is_reversed else x
