"""What both backward kernels do with a block of pairs: weights from lse, dropout, gradients of logits.

Blocks are [block_q, block_k], or turned [block_k, block_q].
"""

import triton
import triton.language as tl

from relpos.backends.triton.dropout import dropped
from relpos.backends.triton.logits import LOG2E, exponential


@triton.jit
def of_queries(x, IS_TURNED: tl.constexpr):
    """x [block_q] as [block_q, 1], or turned as [1, block_q]."""
    if IS_TURNED:
        x = x[None, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def row_normalisers(lse, row_stats, row_stats_size, by_query, is_query, MASK: tl.constexpr):
    """(shift, log_sum) [block_q]: a weight is exponential(logit - shift) divided by 2 ** log_sum.

    One of them is infinite where a query has no key, so that its weights are 0. Under a float mask lse may be
    so large that it has lost the logarithm of the sum, which is stored alone there. Otherwise log_sum is 0.
    """
    if MASK == "float":
        shift = tl.load(row_stats + by_query, mask=is_query, other=0.0)
        return shift, tl.load(row_stats + row_stats_size + by_query, mask=is_query, other=float("inf"))
    b_lse = tl.load(lse + by_query, mask=is_query, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E), tl.zeros_like(b_lse)


@triton.jit
def zeros_without_key(b_grad_out, shift, log_sum, MASK: tl.constexpr):
    """grad_out [block_q, d_v] with zeros for queries without a key, to which NaN may come back."""
    has_key = shift != float("inf")
    if MASK == "float":
        has_key = log_sum != float("inf")
    return tl.where(has_key[:, None], b_grad_out, 0.0)


@triton.jit
def weights_of(logits, shift, log_sum, MASK: tl.constexpr, IS_TURNED: tl.constexpr):
    """Weights before dropout."""
    weights = exponential(logits - of_queries(shift, IS_TURNED), MASK)
    if MASK == "float":
        weights *= tl.exp2(-of_queries(log_sum, IS_TURNED))
    return weights


@triton.jit
def pair_gradients(
    weights, grad_weights, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
    HAS_DROPOUT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """(grad_logits, weights), the weights after dropout.

    grad_logits = weights * (drop(grad_weights) - delta)
    """
    if HAS_DROPOUT:
        is_dropped = dropped(seed, group, i0, j0, threshold, BLOCK_Q, BLOCK_K, IS_TURNED)
        grad_weights = tl.where(is_dropped, 0.0, grad_weights * b_dropout_scale)
    grad_logits = weights * (grad_weights - of_queries(b_delta, IS_TURNED))
    if HAS_DROPOUT:
        weights = tl.where(is_dropped, 0.0, weights * b_dropout_scale)
    return grad_logits, weights


@triton.jit
def far_pair_gradients(
    weights, grad_weights, constant, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
    HAS_DROPOUT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """The same of a far block, where the values' table adds a constant [block_q] to grad_weights.

    Without dropout it is subtracted from delta, so that it costs nothing for a pair.
    """
    if HAS_DROPOUT:
        grad_weights += of_queries(constant, IS_TURNED)
    else:
        b_delta -= constant
    return pair_gradients(
        weights, grad_weights, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
        HAS_DROPOUT, BLOCK_Q, BLOCK_K, IS_TURNED,
    )  # fmt: skip
