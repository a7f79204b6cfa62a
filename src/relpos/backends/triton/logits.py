"""Logits of near and far blocks of pairs, under masks, and their exponentials.

Logits are in base 2, which saves a product for each pair. Under a float mask they are in nats, because the
numbers that other libraries write for -inf would overflow. Queries i and keys j are shaped as in labels.py.
"""

import triton
import triton.language as tl

from relpos.backends.triton.block import dot, widened
from relpos.backends.triton.labels import by_pair, pair_addresses

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logit_scale(scale, scale_rest, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Factor on query . key."""
    if MASK == "float":
        return widened(scale, scale_rest, DTYPE)
    return widened(scale, scale_rest, DTYPE) * LOG2E


@triton.jit
def exponential(x, MASK: tl.constexpr):
    """The exponential of a difference of logits."""
    if MASK == "float":
        # below -1e4 it is 0 anyway, and the product would overflow
        return tl.exp2(tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL) * LOG2E)
    return tl.exp2(x)


@triton.jit
def log_sum_exp(row_max, row_sum, MASK: tl.constexpr):
    """In nats, from the largest logit and the sum of exponentials relative to it."""
    if MASK == "float":
        return row_max + tl.log2(row_sum) * LN2
    return (row_max + tl.log2(row_sum)) * LN2


@triton.jit
def dot_pairs(b_query, b_key, DTYPE: tl.constexpr, PRECISION: tl.constexpr, IS_TURNED: tl.constexpr):
    """query . key, [block_q, block_k] or turned [block_k, block_q]."""
    # one return: Triton compares the types of all that a function has
    if IS_TURNED:
        found = tl.zeros([b_key.shape[0], b_query.shape[0]], DTYPE)
        found = dot(b_key, tl.trans(b_query), found, PRECISION)
    else:
        found = tl.zeros([b_query.shape[0], b_key.shape[0]], DTYPE)
        found = dot(b_query, tl.trans(b_key), found, PRECISION)
    return found


@triton.jit
def masked(logits, mask, i, j, i0, j0, is_there, query_stride, key_stride, MASK: tl.constexpr):
    """Logits under a mask: bool, or float, which is added."""
    at = pair_addresses(mask, i, j, i0, j0, query_stride, key_stride)
    if MASK == "bool":
        return tl.where(tl.load(at, mask=is_there, other=0) != 0, logits, float("-inf"))
    return logits + tl.load(at, mask=is_there, other=0.0).to(logits.dtype)


@triton.jit
def far_logits(
    b_query, b_key, factor, mask, i, j, i0, j0, is_there, mask_n, mask_m,
    MASK: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Logits of a far block, without the relative logit, which is a constant of each query."""
    logits = dot_pairs(b_query, b_key, DTYPE, PRECISION, IS_TURNED) * factor
    if MASK != "none":
        logits = masked(logits, mask, i, j, i0, j0, is_there, mask_n, mask_m, MASK)
    return logits


@triton.jit
def near_logits(
    b_query, b_key, factor, by_label, labels, far_left, far_right, mask,
    i, j, i0, j0, first_row, position, left, right, row_width, is_there, mask_n, mask_m,
    HAS_REL_K: tl.constexpr, HAS_RELATIONS: tl.constexpr, IS_CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Logits of a near block, -inf where a pair may not attend. far_left, far_right: relative logits."""
    logits = dot_pairs(b_query, b_key, DTYPE, PRECISION, IS_TURNED) * factor
    if HAS_REL_K:
        logits += by_pair(
            by_label, i, j, i0, j0, first_row, position, left, right, row_width, labels, is_there,
            far_left, far_right, HAS_RELATIONS,
        )  # fmt: skip
    if MASK != "none":
        logits = masked(logits, mask, i, j, i0, j0, is_there, mask_n, mask_m, MASK)
    if IS_CAUSAL:
        is_there = is_there & (j <= position + i)
    return tl.where(is_there, logits, float("-inf"))
