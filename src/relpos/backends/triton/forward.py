"""Attention forward: one program for each block of queries of a head.

Where all keys of a block are at least `left` before, or `right` after, all queries, one row of the tables
serves every pair: its logit is a constant of the query, and costs nothing beside plain attention. Between,
each query meets each label but the outermost two once. So a row of `by_label` takes first the logits of
labels, then in their place those of pairs: at the end, when the softmax is known, the weights of labels are
read off there and multiplied by the values' table at once.
"""

import triton
import triton.language as tl

from relpos.backends.triton.block import (
    COUNTS,
    add_by_label,
    blocks_over,
    by_pair,
    diagonal,
    existing_keys,
    first_position,
    is_between,
    is_last,
    kept,
    label_products,
    load_rows,
    log_sum_exp,
    logit_scale,
    masked,
    pair_labels,
    parts_of_keys,
    place,
    power,
    product,
    product_with_table,
    products,
    store_rows,
    sum_few_labels,
    visible,
    widened,
)


@triton.jit
def softmax_step(logits, constant, peak, total, MASK: tl.constexpr):
    """(weights, shrink, peak, total) when logits [q, k] + constant [q] come to those that there were.

    The constant enters where the largest logit is taken away, so that it costs nothing for a pair.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1) + constant)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = power(logits - (shift - constant)[:, None], MASK)
    shrink = power(peak - shift, MASK)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=COUNTS)
def forward(
    query, key, value, rel_k, rel_v, relations, mask, starts, key_lengths, seed, out, rest, lse, peaks,
    by_label, sums,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    rel_k_h, rel_k_l, rel_k_d,
    rel_v_h, rel_v_l, rel_v_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    out_b, out_h, out_n,
    num_heads, num_queries, num_keys, start, left, right, row_width, peaks_size,
    scale, scale_rest, threshold, kept_scale, kept_scale_rest,
    GROUPS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REST: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, IS_DETERMINISTIC: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR_K: tl.constexpr, BLOCK_L: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Write out, lse, and under a mask of numbers peaks.

    Args:
        rest: laid out as out; what the 16 bits of out cannot hold of it.
        peaks: [2, batch, heads, query]: the largest logits, and the log, in base 2, of the sums beneath them.
        by_label: [batch, heads, query, row_width], scratch; row_width >= left + right + 1.
        sums: the same, zeros; for labels of relations alone.
        start: position of query 0, where `starts` does not hold one for each sequence.
        threshold: of 2^32 numbers those below drop a weight; kept_scale multiplies the others.
    """
    tl.static_assert(BLOCK_K % NEAR_K == 0)
    DTYPE: tl.constexpr = lse.dtype.element_ty
    HAS_TABLES: tl.constexpr = HAS_REL_K or HAS_REL_V
    HAS_DISTANCES: tl.constexpr = HAS_TABLES and not HAS_RELATIONS
    block, batch, head = place(tl.cdiv(num_queries, BLOCK_Q), num_heads, IS_CAUSAL)
    group = batch * num_heads + head
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
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
    near_begin, near_end, far_end, key_end = parts_of_keys(
        position + i0, key_end, left, right, HAS_TABLES, HAS_RELATIONS, IS_CAUSAL, BLOCK_Q, BLOCK_K
    )
    left_blocks = near_begin // BLOCK_K
    far_blocks = left_blocks + (far_end - near_end) // BLOCK_K
    near_blocks = (near_end - near_begin) // NEAR_K
    general_blocks = near_blocks + blocks_over(key_end - far_end, NEAR_K)

    b_query = load_rows(query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, False)  # [q, d_k]
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    far_left = tl.zeros([BLOCK_Q], DTYPE)
    far_right = tl.zeros([BLOCK_Q], DTYPE)
    if HAS_REL_K:
        label_products(
            b_query, rel_k, rel_k_l, rel_k_d, by_label, first_row, row_width, num_queries - i0, num_labels,
            factor, D_K, PADDED_K, BLOCK_Q, BLOCK_L, PRECISION,
        )  # fmt: skip
        # what one thread wrote others read
        tl.debug_barrier()
        if HAS_DISTANCES:
            row = by_label + first_row + tl.arange(0, BLOCK_Q) * row_width
            far_left = tl.load(row, mask=is_query, other=0.0)
            far_right = tl.load(row + num_labels - 1, mask=is_query, other=0.0)

    peak = tl.full([BLOCK_Q], float("-inf"), DTYPE)
    total = tl.zeros([BLOCK_Q], DTYPE)
    # the same of weights as they are rounded before they meet values
    rounded_total = tl.zeros([BLOCK_Q], DTYPE)
    # kept weights of all keys of the outermost labels
    left_total = tl.zeros([BLOCK_Q], DTYPE)
    right_total = tl.zeros([BLOCK_Q], DTYPE)
    b_out = tl.zeros([BLOCK_Q, PADDED_V], DTYPE)  # [q, d_v]

    for t in range(0, far_blocks):
        is_left = t < left_blocks
        j0 = tl.where(is_left, t * BLOCK_K, near_end + (t - left_blocks) * BLOCK_K)
        b_key = load_rows(key, j0, num_keys, key_m, key_d, BLOCK_K, D_K, PADDED_K, True)  # [k, d_k]
        logits = products(b_query, b_key, DTYPE, PRECISION, False) * factor
        if MASK != "none":
            j = j0 + tl.arange(0, BLOCK_K)
            logits = masked(
                logits, mask, i[:, None], j[None, :], i0, j0, is_query[:, None], mask_n, mask_m, MASK
            )
        constant = tl.where(is_left, far_left, far_right)
        weights, shrink, peak, total = softmax_step(logits, constant, peak, total, MASK)
        if HAS_REST:
            rounded = weights.to(value.dtype.element_ty).to(DTYPE)
            rounded_total = rounded_total * shrink + tl.sum(rounded, 1)
        if HAS_DROPOUT:
            is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, BLOCK_K, False)
            weights = tl.where(is_kept, weights, 0.0)
        if HAS_REL_V:
            by_query = tl.sum(weights, 1)
            left_total = left_total * shrink + tl.where(is_left, by_query, 0.0)
            right_total = right_total * shrink + tl.where(is_left, 0.0, by_query)
        b_value = load_rows(value, j0, num_keys, value_m, value_d, BLOCK_K, D_V, PADDED_V, True)  # [k, d_v]
        b_out = product(weights.to(b_value.dtype), b_value, b_out * shrink[:, None], PRECISION)

    for t in tl.range(0, general_blocks, num_stages=1):
        j0 = tl.where(t < near_blocks, near_begin + t * NEAR_K, far_end + (t - near_blocks) * NEAR_K)
        i2 = i[:, None]
        j2 = j0 + tl.arange(0, NEAR_K)[None, :]
        is_there = is_query[:, None] & (j2 < key_end)
        b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)  # [k, d_k]
        logits = products(b_query, b_key, DTYPE, PRECISION, False) * factor
        if HAS_REL_K:
            labels = j2
            if HAS_RELATIONS:
                labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
            logits += by_pair(
                by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels, is_there,
                far_left[:, None], far_right[:, None], HAS_RELATIONS,
            )  # fmt: skip
        logits = visible(logits, i2, j2, i0, j0, position, is_there, mask, mask_n, mask_m, IS_CAUSAL, MASK)
        if HAS_DROPOUT:
            is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, NEAR_K, False)
        if HAS_REL_V and HAS_DISTANCES:
            stored = logits
            if HAS_DROPOUT:
                stored = tl.where(is_kept, logits, float("-inf"))
            at = diagonal(by_label, i2, j2, i0, j0, first_row, position, left, row_width)
            tl.store(at, stored, mask=is_there & is_between(j2 - (position + i2), left, right))
        weights, shrink, peak, total = softmax_step(logits, tl.zeros_like(peak), peak, total, MASK)
        if HAS_REST:
            rounded = weights.to(value.dtype.element_ty).to(DTYPE)
            rounded_total = rounded_total * shrink + tl.sum(rounded, 1)
        if HAS_DROPOUT:
            weights = tl.where(is_kept, weights, 0.0)
        if HAS_REL_V and HAS_DISTANCES:
            distances = j2 - (position + i2)
            left_total = left_total * shrink + tl.sum(tl.where(distances <= -left, weights, 0.0), 1)
            of_last = tl.where(is_last(distances, left, right), weights, 0.0)
            right_total = right_total * shrink + tl.sum(of_last, 1)
        b_value = load_rows(value, j0, key_end, value_m, value_d, NEAR_K, D_V, PADDED_V, False)  # [k, d_v]
        b_out = product(weights.to(b_value.dtype), b_value, b_out * shrink[:, None], PRECISION)

    shift = tl.where(peak == float("-inf"), 0.0, peak)
    if HAS_REL_V and HAS_RELATIONS:
        # the keys once more, now that the softmax is known: a label may be met any number of times
        for first_label in range(0, num_labels if IS_DETERMINISTIC else 1, FEW):
            few = tl.zeros([BLOCK_Q, FEW], DTYPE)
            for t in tl.range(0, general_blocks, num_stages=1):
                j0 = t * NEAR_K
                i2 = i[:, None]
                j2 = j0 + tl.arange(0, NEAR_K)[None, :]
                is_there = is_query[:, None] & (j2 < key_end)
                b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)
                logits = products(b_query, b_key, DTYPE, PRECISION, False) * factor
                labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
                if HAS_REL_K:
                    logits += by_pair(
                        by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels,
                        is_there, far_left[:, None], far_right[:, None], HAS_RELATIONS,
                    )  # fmt: skip
                logits = visible(
                    logits, i2, j2, i0, j0, position, is_there, mask, mask_n, mask_m, IS_CAUSAL, MASK
                )
                weights = power(logits - shift[:, None], MASK)
                if HAS_DROPOUT:
                    is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, NEAR_K, False)
                    weights = tl.where(is_kept, weights, 0.0)
                if IS_DETERMINISTIC:
                    few += sum_few_labels(labels, weights, first_label, FEW)
                else:
                    add_by_label(sums, i2, i0, first_row, row_width, labels, weights, is_there)
            if IS_DETERMINISTIC:
                store_rows(
                    sums + first_row + first_label, few, 0, num_queries - i0, row_width, BLOCK_Q, FEW, FEW
                )

    # not by its peak: of NaN alone that is -inf on GPUs
    has_key = total != 0.0
    total = tl.where(has_key, total, 1.0)
    if HAS_REST:
        # so weights that are rounded sum to 1, and values that are alike add up to what they are
        inverse = tl.where(has_key, 1.0 / tl.where(has_key, rounded_total, 1.0), 0.0)
    else:
        inverse = tl.where(has_key, 1.0 / total, 0.0)
    if HAS_DROPOUT:
        inverse *= widened(kept_scale, kept_scale_rest, DTYPE)
    b_out *= inverse[:, None]
    if HAS_REL_V:
        tl.debug_barrier()
        if num_labels == 1:
            left_total += right_total
        for first_label in range(0, num_labels, BLOCK_L):
            labels = (first_label + tl.arange(0, BLOCK_L))[None, :]
            at = first_row + tl.arange(0, BLOCK_Q)[:, None] * row_width + labels
            is_label = is_query[:, None] & (labels < num_labels)
            if HAS_RELATIONS:
                weights = tl.load(sums + at, mask=is_label, other=0.0)
            else:
                # of the labels between the outermost only those whose key exists were met
                j2 = position + i[:, None] + labels - left
                is_met = is_label & is_between(labels - left, left, right) & (j2 >= 0) & (j2 < key_end)
                logits = tl.load(by_label + at, mask=is_met, other=float("-inf"))
                weights = power(logits - shift[:, None], MASK)
                weights = tl.where(labels == 0, left_total[:, None], weights)
                is_right = (labels == num_labels - 1) & (labels > 0)
                weights = tl.where(is_right, right_total[:, None], weights)
            # now, since sums of what is not divided yet may be more than float16 holds
            weights *= inverse[:, None]
            b_table = load_rows(
                rel_v, first_label, num_labels, rel_v_l, rel_v_d, BLOCK_L, D_V, PADDED_V, False
            )  # [labels, d_v]
            b_out = product_with_table(weights, b_table, b_out, b_query.dtype, PRECISION)
    store_rows(out + batch * out_b + head * out_h, b_out, i0, num_queries, out_n, BLOCK_Q, D_V, PADDED_V)
    if HAS_REST:
        b_out -= b_out.to(out.dtype.element_ty).to(DTYPE)
        store_rows(rest + batch * out_b + head * out_h, b_out, i0, num_queries, out_n, BLOCK_Q, D_V, PADDED_V)
    b_lse = tl.where(has_key, log_sum_exp(shift, total, MASK), float("-inf"))
    tl.store(lse + group * num_queries + i, b_lse, mask=is_query)
    if MASK == "float":
        at = peaks + group * num_queries + i
        tl.store(at, shift, mask=is_query)
        tl.store(at + peaks_size, tl.where(has_key, tl.log2(total), float("inf")), mask=is_query)
