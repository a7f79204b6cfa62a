"""Labels of pairs: the rows of the tables that they take, and memory that holds a number for each label.

A distance is key minus query. Its label is the row of the tables: `left` for distance 0, 0 (far left) for
`left` or more before, left + right (far right) for `right` or more after. Memory by label is
[batch, heads, query, row_width]. Queries i and keys j are [block_q, 1] and [1, block_k], or turned
[1, block_q] and [block_k, 1]; i0 and j0 are the first of the block.
"""

import triton
import triton.language as tl

from relpos.backends.triton.block import dot_with_table, load_rows, offset


@triton.jit
def pair_addresses(base, i, j, i0, j0, query_stride, key_stride):
    """Addresses of the numbers that a tensor of [query, key] has for the pairs of a block."""
    base += offset(i0, query_stride) + offset(j0, key_stride)
    return base + ((i - i0) * query_stride + (j - j0) * key_stride)


@triton.jit
def pair_labels(relations, i, j, i0, j0, is_there, query_stride, key_stride):
    """Labels that relations give to pairs; -1 for no relation."""
    at = pair_addresses(relations, i, j, i0, j0, query_stride, key_stride)
    return tl.load(at, mask=is_there, other=-1).to(tl.int32)


@triton.jit
def is_between(distances, left, right):
    """Whether a label is neither the first nor the last, so that a query meets it at most once."""
    return (distances > -left) & (distances < right)


@triton.jit
def is_last(distances, left, right):
    """Whether a label is the last. A single label is the first and not the last."""
    return (distances >= right) & (distances > -left)


@triton.jit
def is_met(labels, i, position, key_end, left, right):
    """Whether queries i met the label, which lies between the first and the last: its key exists."""
    j = position + i + labels - left
    return is_between(labels - left, left, right) & (j >= 0) & (j < key_end)


@triton.jit
def diagonal(by_label, i, j, i0, j0, first_row, position, left, row_width):
    """Addresses in by_label of the pairs of a block whose labels are neither the first nor the last.

    The label grows by one along the keys and shrinks by one along the queries, so these addresses are a tile
    with rows of row_width - 1. first_row is where the row of query i0 begins.
    """
    base = by_label + first_row + (j0 - position - i0 + left)
    return base + (i - i0) * (row_width - 1) + (j - j0)


@triton.jit
def by_pair(
    by_label, i, j, i0, j0, first_row, position, left, right, row_width, labels, is_there,
    far_left, far_right, HAS_RELATIONS: tl.constexpr,
):  # fmt: skip
    """The number in by_label of the label of each pair; far_left and far_right are those of each query."""
    if HAS_RELATIONS:
        at = by_label + first_row + (i - i0) * row_width + labels
        return tl.load(at, mask=is_there & (labels >= 0), other=0.0)
    distances = j - (position + i)
    at = diagonal(by_label, i, j, i0, j0, first_row, position, left, row_width)
    found = tl.load(at, mask=is_there & is_between(distances, left, right), other=0.0)
    return tl.where(distances <= -left, far_left, tl.where(is_last(distances, left, right), far_right, found))


@triton.jit
def load_outermost(by_label, rows, num_labels, is_query):
    """(far_left, far_right) [block_q]: the numbers in by_label of the first label and of the last."""
    at = by_label + rows
    return tl.load(at, mask=is_query, other=0.0), tl.load(at + num_labels - 1, mask=is_query, other=0.0)


@triton.jit
def sum_outermost(x, distances, left, right):
    """(far_left, far_right) [block_q]: sums of x [block_q, block_k] over keys of the first and last label."""
    far_left = tl.sum(tl.where(distances <= -left, x, 0.0), 1)
    far_right = tl.sum(tl.where(is_last(distances, left, right), x, 0.0), 1)
    return far_left, far_right


@triton.jit
def with_outermost(x, labels, far_left, far_right, num_labels):
    """x [block_q, block_l] with far_left and far_right [block_q] in the columns of first and last label."""
    x = tl.where(labels == 0, far_left[:, None], x)
    return tl.where((labels == num_labels - 1) & (labels > 0), far_right[:, None], x)


@triton.jit
def dot_labels(
    b_x, table, row_stride, column_stride, by_label, first_row, row_width, num_rows, num_labels, factor,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write factor * b_x . table[label] to by_label, for each label; b_x is [block_q, width]."""
    i = tl.arange(0, BLOCK_Q)
    for first in range(0, num_labels, BLOCK_L):
        # [block_l, width]
        b_table = load_rows(
            table, first, num_labels, row_stride, column_stride, BLOCK_L, WIDTH, PADDED, False
        )
        labels = first + tl.arange(0, BLOCK_L)
        found = tl.zeros([BLOCK_Q, BLOCK_L], by_label.dtype.element_ty)
        found = dot_with_table(b_x, tl.trans(b_table), found, b_x.dtype, PRECISION) * factor
        at = by_label + first_row + i[:, None] * row_width + labels[None, :]
        tl.store(at, found, mask=(i < num_rows)[:, None] & (labels < num_labels)[None, :])


@triton.jit
def add_by_label(sums, i, i0, first_row, row_width, labels, x, is_there):
    """Add x of each pair to the sum of its label. Only the threads of this program share these rows."""
    at = sums + first_row + (i - i0) * row_width + labels
    tl.atomic_add(at, x, mask=is_there & (labels >= 0), sem="relaxed", scope="cta")


@triton.jit
def sum_few_labels(labels, x, first, FEW: tl.constexpr):
    """Sums [block_q, few] of x [block_q, block_k] over keys of labels first, first + 1, ..., in order."""
    few = first + tl.arange(0, FEW)
    return tl.sum(tl.where(labels[:, :, None] == few[None, None, :], x[:, :, None], 0.0), 1)
