"""Backward pass for keys and values: one program for each block of keys of a head.

Weights are found again from lse. As in the forward pass, far blocks read no labels.
"""

import triton
import triton.language as tl

from relpos.backends.triton.backward import (
    far_pair_gradients,
    pair_gradients,
    row_normalisers,
    weights_of,
    zeros_without_key,
)
from relpos.backends.triton.block import COUNTS, dot, load_rows, place, store_rows, widened
from relpos.backends.triton.labels import by_pair, load_outermost, pair_labels
from relpos.backends.triton.logits import dot_pairs, far_logits, logit_scale, near_logits
from relpos.backends.triton.ranges import blocks_over, existing_keys, first_position, query_ranges


@triton.jit(do_not_specialize=COUNTS)
def key_value_gradients(
    query, key, value, relations, mask, starts, key_lengths, seed, grad_out, lse, row_stats, delta,
    logits_by_label, grad_weights_by_label, grad_key, grad_value,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    grad_out_b, grad_out_h, grad_out_n, grad_out_d,
    grad_key_b, grad_key_h, grad_key_m,
    grad_value_b, grad_value_h, grad_value_m,
    num_heads, num_queries, num_keys, start, left, right, row_width, row_stats_size,
    scale, scale_rest, threshold, dropout_scale, dropout_scale_rest,
    GROUPS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR_Q: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one block of keys and values, from all queries of the heads that share them.

    Blocks of pairs are turned, [block_k, block_q]: both gradients are then products of a block as it stands.
    """
    tl.static_assert(BLOCK_Q % NEAR_Q == 0)
    DTYPE: tl.constexpr = lse.dtype.element_ty
    HAS_TABLES: tl.constexpr = HAS_REL_K or HAS_REL_V
    block, batch, key_head = place(tl.cdiv(num_keys, BLOCK_K), num_heads // GROUPS, False)
    j0 = block * BLOCK_K
    j2 = j0 + tl.arange(0, BLOCK_K)[:, None]
    num_labels = left + right + 1
    position = first_position(start, starts, batch, num_queries + num_keys + num_labels, HAS_STARTS)
    key_end = existing_keys(num_keys, key_lengths, batch, HAS_LENGTHS)
    far_right_end, near_begin, near_end, far_end = query_ranges(
        j0 - position, num_queries, left, right, j0 + BLOCK_K <= key_end,
        HAS_TABLES, HAS_RELATIONS, IS_CAUSAL, BLOCK_Q, BLOCK_K,
    )  # fmt: skip
    far_right_blocks = far_right_end // BLOCK_Q
    far_blocks = far_right_blocks + (far_end - near_end) // BLOCK_Q
    whole_near_blocks = (near_end - near_begin) // NEAR_Q
    near_blocks = whole_near_blocks + blocks_over(num_queries - far_end, NEAR_Q)
    if j0 >= key_end:
        far_blocks = 0
        near_blocks = 0

    key += batch * key_b + key_head * key_h
    value += batch * value_b + key_head * value_h
    # [block_k, d_k]
    b_key = load_rows(key, j0, key_end, key_m, key_d, BLOCK_K, D_K, PADDED_K, False)
    # [block_k, d_v]
    b_value = load_rows(value, j0, key_end, value_m, value_d, BLOCK_K, D_V, PADDED_V, False)
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    b_dropout_scale = widened(dropout_scale, dropout_scale_rest, DTYPE)
    b_grad_key = tl.zeros([BLOCK_K, PADDED_K], DTYPE)
    b_grad_value = tl.zeros([BLOCK_K, PADDED_V], DTYPE)

    for head in range(key_head * GROUPS, (key_head + 1) * GROUPS):
        group = batch * num_heads + head
        head_query = query + batch * query_b + head * query_h
        head_grad_out = grad_out + batch * grad_out_b + head * grad_out_h
        head_relations = relations + batch * relations_b + head * relations_h
        head_mask = mask + batch * mask_b + head * mask_h

        for t in range(0, far_blocks):
            is_far_right = t < far_right_blocks
            i0 = tl.where(is_far_right, t * BLOCK_Q, near_end + (t - far_right_blocks) * BLOCK_Q)
            i = i0 + tl.arange(0, BLOCK_Q)
            by_query = group * num_queries + i
            row = by_query * row_width + tl.where(is_far_right, num_labels - 1, 0)
            # [block_q, d_k]
            b_query = load_rows(head_query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, True)
            # [block_q, d_v]
            b_grad_out = load_rows(
                head_grad_out, i0, num_queries, grad_out_n, grad_out_d, BLOCK_Q, D_V, PADDED_V, True
            )
            # [block_q]
            shift, log_sum = row_normalisers(lse, row_stats, row_stats_size, by_query, i < num_queries, MASK)
            if HAS_REL_K:
                shift -= tl.load(logits_by_label + row)
            b_delta = tl.load(delta + by_query)
            constant = tl.zeros_like(b_delta)
            if HAS_REL_V:
                constant = tl.load(grad_weights_by_label + row)
            logits = far_logits(
                b_query, b_key, factor, head_mask, i[None, :], j2, i0, j0, j2 < key_end, mask_n, mask_m,
                MASK, DTYPE, PRECISION, True,
            )  # fmt: skip
            if MASK != "none":
                b_grad_out = zeros_without_key(b_grad_out, shift, log_sum, MASK)
            weights = weights_of(logits, shift, log_sum, MASK, True)
            grad_weights = dot_pairs(b_grad_out, b_value, DTYPE, PRECISION, True)
            grad_logits, weights = far_pair_gradients(
                weights, grad_weights, constant, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
                HAS_DROPOUT, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
            b_grad_value = dot(weights.to(b_grad_out.dtype), b_grad_out, b_grad_value, PRECISION)
            b_grad_key = dot(grad_logits.to(b_query.dtype), b_query, b_grad_key, PRECISION)

        for t in tl.range(0, near_blocks, num_stages=1):
            i0 = tl.where(
                t < whole_near_blocks, near_begin + t * NEAR_Q, far_end + (t - whole_near_blocks) * NEAR_Q
            )
            i = i0 + tl.arange(0, NEAR_Q)
            i2 = i[None, :]
            by_query = group * num_queries + i
            rows = by_query * row_width
            first_row = (group * num_queries + i0) * row_width
            is_query = i < num_queries
            # [near_q, d_k]
            b_query = load_rows(head_query, i0, num_queries, query_n, query_d, NEAR_Q, D_K, PADDED_K, False)
            # [near_q, d_v]
            b_grad_out = load_rows(
                head_grad_out, i0, num_queries, grad_out_n, grad_out_d, NEAR_Q, D_V, PADDED_V, False
            )
            # [near_q]
            shift, log_sum = row_normalisers(lse, row_stats, row_stats_size, by_query, is_query, MASK)
            b_grad_out = zeros_without_key(b_grad_out, shift, log_sum, MASK)
            b_delta = tl.load(delta + by_query, mask=is_query, other=0.0)
            is_there = (i2 < num_queries) & (j2 < key_end)
            labels = j2 - i2
            if HAS_RELATIONS:
                # [block_k, near_q]
                labels = pair_labels(head_relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
            far_left = b_delta
            far_right = b_delta
            if HAS_REL_K:
                far_left, far_right = load_outermost(logits_by_label, rows, num_labels, is_query)
            logits = near_logits(
                b_query, b_key, factor, logits_by_label, labels, far_left[None, :], far_right[None, :],
                head_mask, i2, j2, i0, j0, first_row, position, left, right, row_width, is_there,
                mask_n, mask_m, HAS_REL_K, HAS_RELATIONS, IS_CAUSAL, MASK, DTYPE, PRECISION, True,
            )  # fmt: skip
            weights = weights_of(logits, shift, log_sum, MASK, True)
            grad_weights = dot_pairs(b_grad_out, b_value, DTYPE, PRECISION, True)
            if HAS_REL_V:
                far_left, far_right = load_outermost(grad_weights_by_label, rows, num_labels, is_query)
                grad_weights += by_pair(
                    grad_weights_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width,
                    labels, is_there, far_left[None, :], far_right[None, :], HAS_RELATIONS,
                )  # fmt: skip
            grad_logits, weights = pair_gradients(
                weights, grad_weights, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
                HAS_DROPOUT, NEAR_Q, BLOCK_K, True,
            )  # fmt: skip
            b_grad_value = dot(weights.to(b_grad_out.dtype), b_grad_out, b_grad_value, PRECISION)
            b_grad_key = dot(grad_logits.to(b_query.dtype), b_query, b_grad_key, PRECISION)

    b_grad_key *= widened(scale, scale_rest, DTYPE)
    grad_key += batch * grad_key_b + key_head * grad_key_h
    store_rows(grad_key, b_grad_key, j0, num_keys, grad_key_m, BLOCK_K, D_K, PADDED_K)
    grad_value += batch * grad_value_b + key_head * grad_value_h
    store_rows(grad_value, b_grad_value, j0, num_keys, grad_value_m, BLOCK_K, D_V, PADDED_V)
