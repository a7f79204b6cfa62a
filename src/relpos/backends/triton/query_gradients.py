"""Backward pass for queries: one program for each block of queries of a head.

It also sums weights and gradients of logits for each label, from which tables.py makes the gradients of the
tables. Weights are found again from lse. As in the forward pass, far blocks read no labels.
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
from relpos.backends.triton.block import (
    COUNTS,
    dot,
    dot_with_table,
    load_rows,
    place,
    store_rows,
    widened,
)
from relpos.backends.triton.labels import (
    add_by_label,
    by_pair,
    diagonal,
    is_between,
    is_met,
    load_outermost,
    pair_labels,
    sum_few_labels,
    sum_outermost,
    with_outermost,
)
from relpos.backends.triton.logits import dot_pairs, far_logits, logit_scale, near_logits
from relpos.backends.triton.ranges import blocks_over, existing_keys, first_position, key_ranges


@triton.jit(do_not_specialize=COUNTS)
def query_gradients(
    query, key, value, rel_k, relations, mask, starts, key_lengths, seed, grad_out, lse, row_stats, delta,
    logits_by_label, grad_weights_by_label, grad_logit_sums, weight_sums, grad_query,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    rel_k_h, rel_k_l, rel_k_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    grad_out_b, grad_out_h, grad_out_n, grad_out_d,
    grad_query_b, grad_query_h, grad_query_n,
    num_heads, num_queries, num_keys, start, left, right, row_width, row_stats_size,
    scale, scale_rest, threshold, dropout_scale, dropout_scale_rest,
    GROUPS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, IS_DETERMINISTIC: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR_K: tl.constexpr, BLOCK_L: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one block of queries, and its sums for each label.

    Args:
        grad_logit_sums, weight_sums: [batch, heads, query, row_width]. Gradients of logits, and weights after
            dropout, summed for each label. Of distances they are the memory of logits_by_label and
            grad_weights_by_label, whose place they take; of relations they begin as zeros.
    """
    tl.static_assert(BLOCK_K % NEAR_K == 0)
    DTYPE: tl.constexpr = lse.dtype.element_ty
    HAS_TABLES: tl.constexpr = HAS_REL_K or HAS_REL_V
    HAS_DISTANCES: tl.constexpr = HAS_TABLES and not HAS_RELATIONS
    block, batch, head = place(tl.cdiv(num_queries, BLOCK_Q), num_heads, IS_CAUSAL)
    group = batch * num_heads + head
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    i2 = i[:, None]
    is_query = i < num_queries
    by_query = group * num_queries + i
    first_row = (group * num_queries + i0) * row_width
    query += batch * query_b + head * query_h
    key += batch * key_b + (head // GROUPS) * key_h
    value += batch * value_b + (head // GROUPS) * value_h
    rel_k += head * rel_k_h
    relations += batch * relations_b + head * relations_h
    mask += batch * mask_b + head * mask_h
    grad_out += batch * grad_out_b + head * grad_out_h

    num_labels = left + right + 1
    position = first_position(start, starts, batch, num_queries + num_keys + num_labels, HAS_STARTS)
    key_end = existing_keys(num_keys, key_lengths, batch, HAS_LENGTHS)
    near_begin, near_end, far_end, key_end = key_ranges(
        position + i0, key_end, left, right, HAS_TABLES, HAS_RELATIONS, IS_CAUSAL, BLOCK_Q, BLOCK_K
    )
    far_left_blocks = near_begin // BLOCK_K
    far_blocks = far_left_blocks + (far_end - near_end) // BLOCK_K
    whole_near_blocks = (near_end - near_begin) // NEAR_K
    near_blocks = whole_near_blocks + blocks_over(key_end - far_end, NEAR_K)

    # [block_q, d_k]
    b_query = load_rows(query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, False)
    # [block_q, d_v]
    b_grad_out = load_rows(grad_out, i0, num_queries, grad_out_n, grad_out_d, BLOCK_Q, D_V, PADDED_V, False)
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    b_dropout_scale = widened(dropout_scale, dropout_scale_rest, DTYPE)
    # [block_q]
    shift, log_sum = row_normalisers(lse, row_stats, row_stats_size, by_query, is_query, MASK)
    b_grad_out = zeros_without_key(b_grad_out, shift, log_sum, MASK)
    b_delta = tl.load(delta + by_query, mask=is_query, other=0.0)
    logits_far_left = tl.zeros([BLOCK_Q], DTYPE)
    logits_far_right = tl.zeros([BLOCK_Q], DTYPE)
    grad_weights_far_left = tl.zeros([BLOCK_Q], DTYPE)
    grad_weights_far_right = tl.zeros([BLOCK_Q], DTYPE)
    rows = by_query * row_width
    if HAS_REL_K and HAS_DISTANCES:
        logits_far_left, logits_far_right = load_outermost(logits_by_label, rows, num_labels, is_query)
    if HAS_REL_V and HAS_DISTANCES:
        grad_weights_far_left, grad_weights_far_right = load_outermost(
            grad_weights_by_label, rows, num_labels, is_query
        )

    # sums over all keys of the first label and of the last
    far_left_grad_logit = tl.zeros([BLOCK_Q], DTYPE)
    far_right_grad_logit = tl.zeros([BLOCK_Q], DTYPE)
    far_left_weight = tl.zeros([BLOCK_Q], DTYPE)
    far_right_weight = tl.zeros([BLOCK_Q], DTYPE)
    b_grad_query = tl.zeros([BLOCK_Q, PADDED_K], DTYPE)

    for t in range(0, far_blocks):
        is_far_left = t < far_left_blocks
        j0 = tl.where(is_far_left, t * BLOCK_K, near_end + (t - far_left_blocks) * BLOCK_K)
        j2 = j0 + tl.arange(0, BLOCK_K)[None, :]
        # [block_k, d_k]
        b_key = load_rows(key, j0, num_keys, key_m, key_d, BLOCK_K, D_K, PADDED_K, True)
        # [block_k, d_v]
        b_value = load_rows(value, j0, num_keys, value_m, value_d, BLOCK_K, D_V, PADDED_V, True)
        logits = far_logits(
            b_query, b_key, factor, mask, i2, j2, i0, j0, is_query[:, None], mask_n, mask_m,
            MASK, DTYPE, PRECISION, False,
        )  # fmt: skip
        constant = shift - tl.where(is_far_left, logits_far_left, logits_far_right)
        weights = weights_of(logits, constant, log_sum, MASK, False)
        grad_weights = dot_pairs(b_grad_out, b_value, DTYPE, PRECISION, False)
        constant = tl.where(is_far_left, grad_weights_far_left, grad_weights_far_right)
        grad_logits, weights = far_pair_gradients(
            weights, grad_weights, constant, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
            HAS_DROPOUT, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
        if HAS_REL_K and HAS_DISTANCES:
            of_block = tl.sum(grad_logits, 1)
            far_left_grad_logit += tl.where(is_far_left, of_block, 0.0)
            far_right_grad_logit += tl.where(is_far_left, 0.0, of_block)
        if HAS_REL_V and HAS_DISTANCES:
            of_block = tl.sum(weights, 1)
            far_left_weight += tl.where(is_far_left, of_block, 0.0)
            far_right_weight += tl.where(is_far_left, 0.0, of_block)
        b_grad_query = dot(grad_logits.to(b_key.dtype), b_key, b_grad_query, PRECISION)

    # a relation may be met any number of times: where the order of sums must not change, a few labels at a
    # time, each time with all keys
    for first_label in range(0, num_labels if HAS_RELATIONS and IS_DETERMINISTIC else 1, FEW):
        few_grad_logits = tl.zeros([BLOCK_Q, FEW], DTYPE)
        few_weights = tl.zeros([BLOCK_Q, FEW], DTYPE)
        for t in tl.range(0, near_blocks, num_stages=1):
            j0 = tl.where(
                t < whole_near_blocks, near_begin + t * NEAR_K, far_end + (t - whole_near_blocks) * NEAR_K
            )
            j2 = j0 + tl.arange(0, NEAR_K)[None, :]
            is_there = is_query[:, None] & (j2 < key_end)
            # [near_k, d_k]
            b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)
            # [near_k, d_v]
            b_value = load_rows(value, j0, key_end, value_m, value_d, NEAR_K, D_V, PADDED_V, False)
            labels = j2 - i2
            if HAS_RELATIONS:
                # [block_q, near_k]
                labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
            logits = near_logits(
                b_query, b_key, factor, logits_by_label, labels, logits_far_left[:, None],
                logits_far_right[:, None], mask,
                i2, j2, i0, j0, first_row, position, left, right, row_width, is_there, mask_n, mask_m,
                HAS_REL_K, HAS_RELATIONS, IS_CAUSAL, MASK, DTYPE, PRECISION, False,
            )  # fmt: skip
            weights = weights_of(logits, shift, log_sum, MASK, False)
            grad_weights = dot_pairs(b_grad_out, b_value, DTYPE, PRECISION, False)
            if HAS_REL_V:
                grad_weights += by_pair(
                    grad_weights_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width,
                    labels, is_there, grad_weights_far_left[:, None], grad_weights_far_right[:, None],
                    HAS_RELATIONS,
                )  # fmt: skip
            grad_logits, weights = pair_gradients(
                weights, grad_weights, b_delta, seed, group, i0, j0, threshold, b_dropout_scale,
                HAS_DROPOUT, BLOCK_Q, NEAR_K, False,
            )  # fmt: skip
            if HAS_DISTANCES:
                # threads write where other threads have read
                tl.debug_barrier()
                distances = j2 - (position + i2)
                is_stored = is_there & is_between(distances, left, right)
                if HAS_REL_K:
                    at = diagonal(grad_logit_sums, i2, j2, i0, j0, first_row, position, left, row_width)
                    tl.store(at, grad_logits, mask=is_stored)
                    of_left, of_right = sum_outermost(grad_logits, distances, left, right)
                    far_left_grad_logit += of_left
                    far_right_grad_logit += of_right
                if HAS_REL_V:
                    at = diagonal(weight_sums, i2, j2, i0, j0, first_row, position, left, row_width)
                    tl.store(at, weights, mask=is_stored)
                    of_left, of_right = sum_outermost(weights, distances, left, right)
                    far_left_weight += of_left
                    far_right_weight += of_right
            elif HAS_RELATIONS and IS_DETERMINISTIC:
                few_grad_logits += sum_few_labels(labels, grad_logits, first_label, FEW)
                few_weights += sum_few_labels(labels, weights, first_label, FEW)
            elif HAS_RELATIONS:
                if HAS_REL_K:
                    add_by_label(grad_logit_sums, i2, i0, first_row, row_width, labels, grad_logits, is_there)
                if HAS_REL_V:
                    add_by_label(weight_sums, i2, i0, first_row, row_width, labels, weights, is_there)
            if first_label == 0:
                b_grad_query = dot(grad_logits.to(b_key.dtype), b_key, b_grad_query, PRECISION)
        if HAS_RELATIONS and IS_DETERMINISTIC:
            num_rows = num_queries - i0
            if HAS_REL_K:
                at = grad_logit_sums + first_row + first_label
                store_rows(at, few_grad_logits, 0, num_rows, row_width, BLOCK_Q, FEW, FEW)
            if HAS_REL_V:
                at = weight_sums + first_row + first_label
                store_rows(at, few_weights, 0, num_rows, row_width, BLOCK_Q, FEW, FEW)

    if HAS_TABLES:
        tl.debug_barrier()
        if num_labels == 1:
            far_left_grad_logit += far_right_grad_logit
            far_left_weight += far_right_weight
        for first_label in range(0, num_labels, BLOCK_L):
            labels = (first_label + tl.arange(0, BLOCK_L))[None, :]
            at = first_row + tl.arange(0, BLOCK_Q)[:, None] * row_width + labels
            is_label = is_query[:, None] & (labels < num_labels)
            # [block_q, block_l]
            if HAS_DISTANCES:
                is_stored = is_label & is_met(labels, i2, position, key_end, left, right)
                if HAS_REL_V:
                    weights = tl.load(weight_sums + at, mask=is_stored, other=0.0)
                    weights = with_outermost(weights, labels, far_left_weight, far_right_weight, num_labels)
                    tl.store(weight_sums + at, weights, mask=is_label)
                if HAS_REL_K:
                    grad_logits = tl.load(grad_logit_sums + at, mask=is_stored, other=0.0)
                    grad_logits = with_outermost(
                        grad_logits, labels, far_left_grad_logit, far_right_grad_logit, num_labels
                    )
                    tl.store(grad_logit_sums + at, grad_logits, mask=is_label)
            elif HAS_REL_K:
                grad_logits = tl.load(grad_logit_sums + at, mask=is_label, other=0.0)
            if HAS_REL_K:
                # [block_l, d_k]
                b_table = load_rows(
                    rel_k, first_label, num_labels, rel_k_l, rel_k_d, BLOCK_L, D_K, PADDED_K, False
                )
                b_grad_query = dot_with_table(grad_logits, b_table, b_grad_query, b_query.dtype, PRECISION)
    b_grad_query *= widened(scale, scale_rest, DTYPE)
    grad_query += batch * grad_query_b + head * grad_query_h
    store_rows(grad_query, b_grad_query, i0, num_queries, grad_query_n, BLOCK_Q, D_K, PADDED_K)
