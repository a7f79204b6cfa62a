"""Attention forward: one program for each block of queries of a head.

In a far block one row of the tables serves every pair: its relative logit is a constant of the query, and
costs nothing beside plain attention. In near blocks each query meets each label but the first and the last at
most once. So by_label holds first the logits of labels, then in their place the logits of pairs. When the
softmax is known, the weights of labels are read from there and multiplied by the values' table.
"""

import triton
import triton.language as tl

from relpos.backends.triton.block import (
    COUNTS,
    dot,
    dot_with_table,
    load_rows,
    place,
    store_rows,
    widened,
)
from relpos.backends.triton.dropout import dropped
from relpos.backends.triton.labels import (
    add_by_label,
    diagonal,
    dot_labels,
    is_between,
    is_met,
    load_outermost,
    pair_labels,
    sum_few_labels,
    sum_outermost,
    with_outermost,
)
from relpos.backends.triton.logits import exponential, far_logits, log_sum_exp, logit_scale, near_logits
from relpos.backends.triton.ranges import blocks_over, existing_keys, first_position, key_ranges


@triton.jit
def softmax_step(logits, constant, row_max, row_sum, MASK: tl.constexpr):
    """(weights, alpha, row_max, row_sum) after logits [block_q, block_k] + constant [block_q] are added.

    The constant is added to the number that is subtracted anyway, so that it costs nothing for a pair.
    """
    new_row_max = tl.maximum(row_max, tl.max(logits, 1) + constant)
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = exponential(logits - (shift - constant)[:, None], MASK)
    alpha = exponential(row_max - shift, MASK)
    return weights, alpha, new_row_max, row_sum * alpha + tl.sum(weights, 1)


@triton.jit(do_not_specialize=COUNTS)
def forward(
    query, key, value, rel_k, rel_v, relations, mask, starts, key_lengths, seed, out, rest, lse, row_stats,
    by_label, sums,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    rel_k_h, rel_k_l, rel_k_d,
    rel_v_h, rel_v_l, rel_v_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    out_b, out_h, out_n,
    num_heads, num_queries, num_keys, start, left, right, row_width, row_stats_size,
    scale, scale_rest, threshold, dropout_scale, dropout_scale_rest,
    GROUPS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REST: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, IS_DETERMINISTIC: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR_K: tl.constexpr, BLOCK_L: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Write out, lse, and under a float mask row_stats.

    Args:
        rest: laid out as out; the part of it that 16 bits cannot hold.
        row_stats: [2, batch, heads, query]: row_max, and the logarithm to base 2 of row_sum.
        by_label: [batch, heads, query, row_width], scratch; row_width >= left + right + 1.
        sums: the same, zeros; for labels of relations only.
        start: position of query 0, where `starts` does not hold one for each sequence.
        threshold: a weight is dropped if its random number of 32 bits is below; dropout_scale multiplies the
            others.
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
    first_row = (group * num_queries + i0) * row_width
    query += batch * query_b + head * query_h
    key += batch * key_b + (head // GROUPS) * key_h
    value += batch * value_b + (head // GROUPS) * value_h
    rel_k += head * rel_k_h
    rel_v += head * rel_v_h
    relations += batch * relations_b + head * relations_h
    mask += batch * mask_b + head * mask_h

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
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    logits_far_left = tl.zeros([BLOCK_Q], DTYPE)
    logits_far_right = tl.zeros([BLOCK_Q], DTYPE)
    if HAS_REL_K:
        dot_labels(
            b_query, rel_k, rel_k_l, rel_k_d, by_label, first_row, row_width, num_queries - i0, num_labels,
            factor, D_K, PADDED_K, BLOCK_Q, BLOCK_L, PRECISION,
        )  # fmt: skip
        # threads read what other threads wrote
        tl.debug_barrier()
        if HAS_DISTANCES:
            rows = first_row + tl.arange(0, BLOCK_Q) * row_width
            logits_far_left, logits_far_right = load_outermost(by_label, rows, num_labels, is_query)

    row_max = tl.full([BLOCK_Q], float("-inf"), DTYPE)
    row_sum = tl.zeros([BLOCK_Q], DTYPE)
    # the sum of weights as they are rounded for the product with values
    rounded_sum = tl.zeros([BLOCK_Q], DTYPE)
    # sums of weights, after dropout, of all keys of the first and of the last label
    far_left_weight = tl.zeros([BLOCK_Q], DTYPE)
    far_right_weight = tl.zeros([BLOCK_Q], DTYPE)
    b_out = tl.zeros([BLOCK_Q, PADDED_V], DTYPE)

    for t in range(0, far_blocks):
        is_far_left = t < far_left_blocks
        j0 = tl.where(is_far_left, t * BLOCK_K, near_end + (t - far_left_blocks) * BLOCK_K)
        j2 = j0 + tl.arange(0, BLOCK_K)[None, :]
        # [block_k, d_k]
        b_key = load_rows(key, j0, num_keys, key_m, key_d, BLOCK_K, D_K, PADDED_K, True)
        logits = far_logits(
            b_query, b_key, factor, mask, i2, j2, i0, j0, is_query[:, None], mask_n, mask_m,
            MASK, DTYPE, PRECISION, False,
        )  # fmt: skip
        constant = tl.where(is_far_left, logits_far_left, logits_far_right)
        weights, alpha, row_max, row_sum = softmax_step(logits, constant, row_max, row_sum, MASK)
        if HAS_REST:
            rounded = weights.to(value.dtype.element_ty).to(DTYPE)
            rounded_sum = rounded_sum * alpha + tl.sum(rounded, 1)
        if HAS_DROPOUT:
            is_dropped = dropped(seed, group, i0, j0, threshold, BLOCK_Q, BLOCK_K, False)
            weights = tl.where(is_dropped, 0.0, weights)
        if HAS_REL_V:
            of_block = tl.sum(weights, 1)
            far_left_weight = far_left_weight * alpha + tl.where(is_far_left, of_block, 0.0)
            far_right_weight = far_right_weight * alpha + tl.where(is_far_left, 0.0, of_block)
        # [block_k, d_v]
        b_value = load_rows(value, j0, num_keys, value_m, value_d, BLOCK_K, D_V, PADDED_V, True)
        b_out = dot(weights.to(b_value.dtype), b_value, b_out * alpha[:, None], PRECISION)

    for t in tl.range(0, near_blocks, num_stages=1):
        j0 = tl.where(
            t < whole_near_blocks, near_begin + t * NEAR_K, far_end + (t - whole_near_blocks) * NEAR_K
        )
        j2 = j0 + tl.arange(0, NEAR_K)[None, :]
        is_there = is_query[:, None] & (j2 < key_end)
        # [near_k, d_k]
        b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)
        labels = j2
        if HAS_REL_K and HAS_RELATIONS:
            # [block_q, near_k]
            labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
        logits = near_logits(
            b_query, b_key, factor, by_label, labels, logits_far_left[:, None], logits_far_right[:, None],
            mask, i2, j2, i0, j0, first_row, position, left, right, row_width, is_there, mask_n, mask_m,
            HAS_REL_K, HAS_RELATIONS, IS_CAUSAL, MASK, DTYPE, PRECISION, False,
        )  # fmt: skip
        if HAS_DROPOUT:
            is_dropped = dropped(seed, group, i0, j0, threshold, BLOCK_Q, NEAR_K, False)
        if HAS_REL_V and HAS_DISTANCES:
            stored = logits
            if HAS_DROPOUT:
                stored = tl.where(is_dropped, float("-inf"), logits)
            at = diagonal(by_label, i2, j2, i0, j0, first_row, position, left, row_width)
            tl.store(at, stored, mask=is_there & is_between(j2 - (position + i2), left, right))
        weights, alpha, row_max, row_sum = softmax_step(
            logits, tl.zeros_like(row_max), row_max, row_sum, MASK
        )
        if HAS_REST:
            rounded = weights.to(value.dtype.element_ty).to(DTYPE)
            rounded_sum = rounded_sum * alpha + tl.sum(rounded, 1)
        if HAS_DROPOUT:
            weights = tl.where(is_dropped, 0.0, weights)
        if HAS_REL_V and HAS_DISTANCES:
            of_left, of_right = sum_outermost(weights, j2 - (position + i2), left, right)
            far_left_weight = far_left_weight * alpha + of_left
            far_right_weight = far_right_weight * alpha + of_right
        # [near_k, d_v]
        b_value = load_rows(value, j0, key_end, value_m, value_d, NEAR_K, D_V, PADDED_V, False)
        b_out = dot(weights.to(b_value.dtype), b_value, b_out * alpha[:, None], PRECISION)

    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    if HAS_REL_V and HAS_RELATIONS:
        # the keys once more, now that the softmax is known: a label may be met any number of times
        for first_label in range(0, num_labels if IS_DETERMINISTIC else 1, FEW):
            few = tl.zeros([BLOCK_Q, FEW], DTYPE)
            for t in tl.range(0, near_blocks, num_stages=1):
                j0 = t * NEAR_K
                j2 = j0 + tl.arange(0, NEAR_K)[None, :]
                is_there = is_query[:, None] & (j2 < key_end)
                # [near_k, d_k]
                b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)
                # [block_q, near_k]
                labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
                logits = near_logits(
                    b_query, b_key, factor, by_label, labels,
                    logits_far_left[:, None], logits_far_right[:, None], mask,
                    i2, j2, i0, j0, first_row, position, left, right, row_width, is_there, mask_n, mask_m,
                    HAS_REL_K, HAS_RELATIONS, IS_CAUSAL, MASK, DTYPE, PRECISION, False,
                )  # fmt: skip
                weights = exponential(logits - shift[:, None], MASK)
                if HAS_DROPOUT:
                    is_dropped = dropped(seed, group, i0, j0, threshold, BLOCK_Q, NEAR_K, False)
                    weights = tl.where(is_dropped, 0.0, weights)
                if IS_DETERMINISTIC:
                    few += sum_few_labels(labels, weights, first_label, FEW)
                else:
                    add_by_label(sums, i2, i0, first_row, row_width, labels, weights, is_there)
            if IS_DETERMINISTIC:
                store_rows(
                    sums + first_row + first_label, few, 0, num_queries - i0, row_width, BLOCK_Q, FEW, FEW
                )

    # not by row_max: if all logits are NaN it is -inf on GPUs
    has_key = row_sum != 0.0
    row_sum = tl.where(has_key, row_sum, 1.0)
    if HAS_REST:
        # so rounded weights sum to 1, and the mean of equal values is that value
        inverse = tl.where(has_key, 1.0 / tl.where(has_key, rounded_sum, 1.0), 0.0)
    else:
        inverse = tl.where(has_key, 1.0 / row_sum, 0.0)
    if HAS_DROPOUT:
        inverse *= widened(dropout_scale, dropout_scale_rest, DTYPE)
    b_out *= inverse[:, None]
    if HAS_REL_V:
        tl.debug_barrier()
        if num_labels == 1:
            far_left_weight += far_right_weight
        for first_label in range(0, num_labels, BLOCK_L):
            labels = (first_label + tl.arange(0, BLOCK_L))[None, :]
            at = first_row + tl.arange(0, BLOCK_Q)[:, None] * row_width + labels
            is_label = is_query[:, None] & (labels < num_labels)
            # [block_q, block_l]
            if HAS_RELATIONS:
                weights = tl.load(sums + at, mask=is_label, other=0.0)
            else:
                is_stored = is_label & is_met(labels, i2, position, key_end, left, right)
                logits = tl.load(by_label + at, mask=is_stored, other=float("-inf"))
                weights = exponential(logits - shift[:, None], MASK)
                weights = with_outermost(weights, labels, far_left_weight, far_right_weight, num_labels)
            # now, because sums before the division may be more than float16 holds
            weights *= inverse[:, None]
            # [block_l, d_v]
            b_table = load_rows(
                rel_v, first_label, num_labels, rel_v_l, rel_v_d, BLOCK_L, D_V, PADDED_V, False
            )
            b_out = dot_with_table(weights, b_table, b_out, b_query.dtype, PRECISION)
    store_rows(out + batch * out_b + head * out_h, b_out, i0, num_queries, out_n, BLOCK_Q, D_V, PADDED_V)
    if HAS_REST:
        b_out -= b_out.to(out.dtype.element_ty).to(DTYPE)
        store_rows(rest + batch * out_b + head * out_h, b_out, i0, num_queries, out_n, BLOCK_Q, D_V, PADDED_V)
    b_lse = tl.where(has_key, log_sum_exp(shift, row_sum, MASK), float("-inf"))
    tl.store(lse + group * num_queries + i, b_lse, mask=is_query)
    if MASK == "float":
        at = row_stats + group * num_queries + i
        tl.store(at, shift, mask=is_query)
        tl.store(at + row_stats_size, tl.where(has_key, tl.log2(row_sum), float("inf")), mask=is_query)
