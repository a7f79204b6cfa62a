"""Attention backward, between the two kernels of tables.py. No program writes to what another does.

    key_value_gradients one program for each block of keys of a head: gradients of keys and values
    query_gradients     one program for each block of queries: gradients of queries, and the weights and the
                        gradients of logits summed for each label

Weights are found again from lse. As forward, blocks that one row of the tables serves read no labels.
"""

import triton
import triton.language as tl

from relpos.backends.triton.block import (
    COUNTS,
    LOG2E,
    add_by_label,
    blocks_over,
    by_pair,
    diagonal,
    existing_keys,
    first_position,
    is_between,
    is_last,
    kept,
    load_rows,
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
    whole_blocks,
    widened,
)


@triton.jit
def normalisers(lse, peaks, peaks_size, by_query, is_query, MASK: tl.constexpr):
    """(shift, log_total) of queries: a weight is power(logit - shift) divided by 2 ** log_total.

    One is infinite where a query has no key, so that its weights are 0. Under a mask of numbers lse may be so
    large that it has lost the logarithm of the sum, which stands alone there; otherwise log_total is 0.
    """
    if MASK == "float":
        shift = tl.load(peaks + by_query, mask=is_query, other=0.0)
        return shift, tl.load(peaks + peaks_size + by_query, mask=is_query, other=float("inf"))
    b_lse = tl.load(lse + by_query, mask=is_query, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E), tl.zeros_like(b_lse)


@triton.jit
def weights_of(logits, shift, log_total, MASK: tl.constexpr):
    """Weights of pairs; shift and log_total are of the shape of queries."""
    weights = power(logits - shift, MASK)
    if MASK == "float":
        weights *= tl.exp2(-log_total)
    return weights


@triton.jit(do_not_specialize=COUNTS)
def key_value_gradients(
    query, key, value, relations, mask, starts, key_lengths, seed, grad_out, lse, peaks, delta,
    logits_by_label, weights_by_label, grad_key, grad_value,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    grad_out_b, grad_out_h, grad_out_n, grad_out_d,
    grad_key_b, grad_key_h, grad_key_m,
    grad_value_b, grad_value_h, grad_value_m,
    num_heads, num_queries, num_keys, start, left, right, row_width, peaks_size,
    scale, scale_rest, threshold, kept_scale, kept_scale_rest,
    GROUPS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NEAR_Q: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one block of keys and values, from all queries of the heads that share them.

    Tiles are turned, [k, q], so that both gradients are products of a tile as it stands.
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

    # whole blocks of queries far to the right of which lie all keys, [0, near_begin), and far to the left
    # of which they lie, [near_end, far_end); what no query sees is in neither, nor in the general part
    far_end = whole_blocks(num_queries, BLOCK_Q) * BLOCK_Q
    near_begin = 0
    near_end = far_end
    skipped = 0
    first = j0 - position
    last = first + BLOCK_K - 1
    if IS_CAUSAL:
        skipped = tl.minimum(whole_blocks(first, BLOCK_Q) * BLOCK_Q, far_end)
    if j0 + BLOCK_K <= key_end and not HAS_RELATIONS:
        if HAS_TABLES or IS_CAUSAL:
            near_end = tl.minimum(blocks_over(last + left, BLOCK_Q) * BLOCK_Q, far_end)
            if not IS_CAUSAL:
                near_begin = tl.minimum(whole_blocks(first - right + 1, BLOCK_Q) * BLOCK_Q, near_end)
        else:
            near_end = 0
    general_begin = tl.maximum(near_begin, skipped)
    general_end = tl.maximum(near_end, general_begin)
    right_blocks = near_begin // BLOCK_Q
    far_blocks = right_blocks + (far_end - general_end) // BLOCK_Q
    near_blocks = (general_end - general_begin) // NEAR_Q
    general_blocks = near_blocks + blocks_over(num_queries - far_end, NEAR_Q)
    if j0 >= key_end:
        far_blocks = 0
        general_blocks = 0

    key += batch * key_b + key_head * key_h
    value += batch * value_b + key_head * value_h
    b_key = load_rows(key, j0, key_end, key_m, key_d, BLOCK_K, D_K, PADDED_K, False)  # [k, d_k]
    b_value = load_rows(value, j0, key_end, value_m, value_d, BLOCK_K, D_V, PADDED_V, False)  # [k, d_v]
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    larger = widened(kept_scale, kept_scale_rest, DTYPE)
    b_grad_key = tl.zeros([BLOCK_K, PADDED_K], DTYPE)
    b_grad_value = tl.zeros([BLOCK_K, PADDED_V], DTYPE)

    for head in range(key_head * GROUPS, (key_head + 1) * GROUPS):
        group = batch * num_heads + head
        head_query = query + batch * query_b + head * query_h
        head_grad_out = grad_out + batch * grad_out_b + head * grad_out_h
        head_relations = relations + batch * relations_b + head * relations_h
        head_mask = mask + batch * mask_b + head * mask_h

        for t in range(0, far_blocks):
            is_right = t < right_blocks
            i0 = tl.where(is_right, t * BLOCK_Q, general_end + (t - right_blocks) * BLOCK_Q)
            i = i0 + tl.arange(0, BLOCK_Q)
            by_query = group * num_queries + i
            row = by_query * row_width + tl.where(is_right, num_labels - 1, 0)
            is_query = i < num_queries
            b_query = load_rows(
                head_query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, True
            )  # [q, d_k]
            b_grad_out = load_rows(
                head_grad_out, i0, num_queries, grad_out_n, grad_out_d, BLOCK_Q, D_V, PADDED_V, True
            )  # [q, d_v]
            shift, log_total = normalisers(lse, peaks, peaks_size, by_query, is_query, MASK)
            if HAS_REL_K:
                shift -= tl.load(logits_by_label + row)
            b_delta = tl.load(delta + by_query)
            if HAS_REL_V:
                b_delta_of_weights = tl.load(weights_by_label + row)
            logits = products(b_query, b_key, DTYPE, PRECISION, True) * factor
            if MASK != "none":
                logits = masked(logits, head_mask, i[None, :], j2, i0, j0, j2 < key_end, mask_n, mask_m, MASK)
                # a query without a key may bring what is no number
                has_key = shift != float("inf")
                if MASK == "float":
                    has_key = log_total != float("inf")
                b_grad_out = tl.where(has_key[:, None], b_grad_out, 0.0)
            weights = weights_of(logits, shift[None, :], log_total[None, :], MASK)
            grad_weights = products(b_grad_out, b_value, DTYPE, PRECISION, True)
            if HAS_DROPOUT:
                is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, BLOCK_K, True)
                if HAS_REL_V:
                    grad_weights += b_delta_of_weights[None, :]
                grad_logits = weights * (tl.where(is_kept, grad_weights * larger, 0.0) - b_delta[None, :])
                weights = tl.where(is_kept, weights * larger, 0.0)
            else:
                if HAS_REL_V:
                    b_delta -= b_delta_of_weights
                grad_logits = weights * (grad_weights - b_delta[None, :])
            b_grad_value = product(weights.to(b_grad_out.dtype), b_grad_out, b_grad_value, PRECISION)
            b_grad_key = product(grad_logits.to(b_query.dtype), b_query, b_grad_key, PRECISION)

        for t in tl.range(0, general_blocks, num_stages=1):
            i0 = tl.where(t < near_blocks, general_begin + t * NEAR_Q, far_end + (t - near_blocks) * NEAR_Q)
            i = i0 + tl.arange(0, NEAR_Q)
            i2 = i[None, :]
            by_query = group * num_queries + i
            first_row = (group * num_queries + i0) * row_width
            is_query = i < num_queries
            b_query = load_rows(
                head_query, i0, num_queries, query_n, query_d, NEAR_Q, D_K, PADDED_K, False
            )  # [q, d_k]
            b_grad_out = load_rows(
                head_grad_out, i0, num_queries, grad_out_n, grad_out_d, NEAR_Q, D_V, PADDED_V, False
            )  # [q, d_v]
            shift, log_total = normalisers(lse, peaks, peaks_size, by_query, is_query, MASK)
            has_key = shift != float("inf")
            if MASK == "float":
                has_key = log_total != float("inf")
            b_grad_out = tl.where(has_key[:, None], b_grad_out, 0.0)
            b_delta = tl.load(delta + by_query, mask=is_query, other=0.0)
            is_there = (i2 < num_queries) & (j2 < key_end)
            labels = j2 - i2
            if HAS_RELATIONS:
                labels = pair_labels(head_relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
            logits = products(b_query, b_key, DTYPE, PRECISION, True) * factor
            if HAS_REL_K:
                row = logits_by_label + by_query * row_width
                of_left = tl.load(row, mask=is_query, other=0.0)
                of_right = tl.load(row + num_labels - 1, mask=is_query, other=0.0)
                logits += by_pair(
                    logits_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels,
                    is_there, of_left[None, :], of_right[None, :], HAS_RELATIONS,
                )  # fmt: skip
            logits = visible(
                logits, i2, j2, i0, j0, position, is_there, head_mask, mask_n, mask_m, IS_CAUSAL, MASK
            )
            weights = weights_of(logits, shift[None, :], log_total[None, :], MASK)
            grad_weights = products(b_grad_out, b_value, DTYPE, PRECISION, True)
            if HAS_REL_V:
                row = weights_by_label + by_query * row_width
                of_left = tl.load(row, mask=is_query, other=0.0)
                of_right = tl.load(row + num_labels - 1, mask=is_query, other=0.0)
                grad_weights += by_pair(
                    weights_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels,
                    is_there, of_left[None, :], of_right[None, :], HAS_RELATIONS,
                )  # fmt: skip
            if HAS_DROPOUT:
                is_kept = kept(seed, group, i0, j0, threshold, NEAR_Q, BLOCK_K, True)
                grad_weights = tl.where(is_kept, grad_weights * larger, 0.0)
            grad_logits = weights * (grad_weights - b_delta[None, :])
            if HAS_DROPOUT:
                weights = tl.where(is_kept, weights * larger, 0.0)
            b_grad_value = product(weights.to(b_grad_out.dtype), b_grad_out, b_grad_value, PRECISION)
            b_grad_key = product(grad_logits.to(b_query.dtype), b_query, b_grad_key, PRECISION)

    b_grad_key *= widened(scale, scale_rest, DTYPE)
    store_rows(
        grad_key + batch * grad_key_b + key_head * grad_key_h, b_grad_key, j0, num_keys, grad_key_m,
        BLOCK_K, D_K, PADDED_K,
    )  # fmt: skip
    store_rows(
        grad_value + batch * grad_value_b + key_head * grad_value_h, b_grad_value, j0, num_keys,
        grad_value_m, BLOCK_K, D_V, PADDED_V,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def query_gradients(
    query, key, value, rel_k, relations, mask, starts, key_lengths, seed, grad_out, lse, peaks, delta,
    logits_by_label, weights_by_label, logit_sums, weight_sums, grad_query,
    query_b, query_h, query_n, query_d,
    key_b, key_h, key_m, key_d,
    value_b, value_h, value_m, value_d,
    rel_k_h, rel_k_l, rel_k_d,
    relations_b, relations_h, relations_n, relations_m,
    mask_b, mask_h, mask_n, mask_m,
    grad_out_b, grad_out_h, grad_out_n, grad_out_d,
    grad_query_b, grad_query_h, grad_query_n,
    num_heads, num_queries, num_keys, start, left, right, row_width, peaks_size,
    scale, scale_rest, threshold, kept_scale, kept_scale_rest,
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
        logit_sums, weight_sums: [batch, heads, query, row_width]. Gradients of logits, and kept weights,
            summed for each label. Of distances they are the memory of logits_by_label and weights_by_label,
            whose place they take; of relations they begin as zeros.
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
    near_begin, near_end, far_end, key_end = parts_of_keys(
        position + i0, key_end, left, right, HAS_TABLES, HAS_RELATIONS, IS_CAUSAL, BLOCK_Q, BLOCK_K
    )
    left_blocks = near_begin // BLOCK_K
    far_blocks = left_blocks + (far_end - near_end) // BLOCK_K
    near_blocks = (near_end - near_begin) // NEAR_K
    general_blocks = near_blocks + blocks_over(key_end - far_end, NEAR_K)

    b_query = load_rows(query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, False)  # [q, d_k]
    b_grad_out = load_rows(
        grad_out, i0, num_queries, grad_out_n, grad_out_d, BLOCK_Q, D_V, PADDED_V, False
    )  # [q, d_v]
    factor = logit_scale(scale, scale_rest, DTYPE, MASK)
    larger = widened(kept_scale, kept_scale_rest, DTYPE)
    shift, log_total = normalisers(lse, peaks, peaks_size, by_query, is_query, MASK)
    has_key = (log_total if MASK == "float" else shift) != float("inf")
    # a query without a key may bring what is no number
    b_grad_out = tl.where(has_key[:, None], b_grad_out, 0.0)
    b_delta = tl.load(delta + by_query, mask=is_query, other=0.0)
    logits_left = tl.zeros([BLOCK_Q], DTYPE)
    logits_right = tl.zeros([BLOCK_Q], DTYPE)
    weights_left = tl.zeros([BLOCK_Q], DTYPE)
    weights_right = tl.zeros([BLOCK_Q], DTYPE)
    if HAS_REL_K and HAS_DISTANCES:
        row = logits_by_label + by_query * row_width
        logits_left = tl.load(row, mask=is_query, other=0.0)
        logits_right = tl.load(row + num_labels - 1, mask=is_query, other=0.0)
    if HAS_REL_V and HAS_DISTANCES:
        row = weights_by_label + by_query * row_width
        weights_left = tl.load(row, mask=is_query, other=0.0)
        weights_right = tl.load(row + num_labels - 1, mask=is_query, other=0.0)

    # sums over all keys of the outermost labels
    left_logit_sum = tl.zeros([BLOCK_Q], DTYPE)
    right_logit_sum = tl.zeros([BLOCK_Q], DTYPE)
    left_weight_sum = tl.zeros([BLOCK_Q], DTYPE)
    right_weight_sum = tl.zeros([BLOCK_Q], DTYPE)
    b_grad_query = tl.zeros([BLOCK_Q, PADDED_K], DTYPE)

    for t in range(0, far_blocks):
        is_left = t < left_blocks
        j0 = tl.where(is_left, t * BLOCK_K, near_end + (t - left_blocks) * BLOCK_K)
        b_key = load_rows(key, j0, num_keys, key_m, key_d, BLOCK_K, D_K, PADDED_K, True)  # [k, d_k]
        b_value = load_rows(value, j0, num_keys, value_m, value_d, BLOCK_K, D_V, PADDED_V, True)  # [k, d_v]
        logits = products(b_query, b_key, DTYPE, PRECISION, False) * factor
        if MASK != "none":
            j2 = j0 + tl.arange(0, BLOCK_K)[None, :]
            logits = masked(logits, mask, i2, j2, i0, j0, is_query[:, None], mask_n, mask_m, MASK)
        constant = shift - tl.where(is_left, logits_left, logits_right)
        weights = weights_of(logits, constant[:, None], log_total[:, None], MASK)
        grad_weights = products(b_grad_out, b_value, DTYPE, PRECISION, False)
        constant = tl.where(is_left, weights_left, weights_right)
        if HAS_DROPOUT:
            is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, BLOCK_K, False)
            grad_weights = tl.where(is_kept, (grad_weights + constant[:, None]) * larger, 0.0)
            grad_logits = weights * (grad_weights - b_delta[:, None])
            weights = tl.where(is_kept, weights * larger, 0.0)
        else:
            grad_logits = weights * (grad_weights - (b_delta - constant)[:, None])
        if HAS_REL_K and HAS_DISTANCES:
            of_block = tl.sum(grad_logits, 1)
            left_logit_sum += tl.where(is_left, of_block, 0.0)
            right_logit_sum += tl.where(is_left, 0.0, of_block)
        if HAS_REL_V and HAS_DISTANCES:
            of_block = tl.sum(weights, 1)
            left_weight_sum += tl.where(is_left, of_block, 0.0)
            right_weight_sum += tl.where(is_left, 0.0, of_block)
        b_grad_query = product(grad_logits.to(b_key.dtype), b_key, b_grad_query, PRECISION)

    # of relations a label may be met any number of times: where the order of sums must not change, a few
    # labels at a time, each time with all keys
    for first_label in range(0, num_labels if HAS_RELATIONS and IS_DETERMINISTIC else 1, FEW):
        few_logits = tl.zeros([BLOCK_Q, FEW], DTYPE)
        few_weights = tl.zeros([BLOCK_Q, FEW], DTYPE)
        for t in tl.range(0, general_blocks, num_stages=1):
            j0 = tl.where(t < near_blocks, near_begin + t * NEAR_K, far_end + (t - near_blocks) * NEAR_K)
            j2 = j0 + tl.arange(0, NEAR_K)[None, :]
            is_there = is_query[:, None] & (j2 < key_end)
            b_key = load_rows(key, j0, key_end, key_m, key_d, NEAR_K, D_K, PADDED_K, False)  # [k, d_k]
            b_value = load_rows(
                value, j0, key_end, value_m, value_d, NEAR_K, D_V, PADDED_V, False
            )  # [k, d_v]
            labels = j2 - i2
            if HAS_RELATIONS:
                labels = pair_labels(relations, i2, j2, i0, j0, is_there, relations_n, relations_m)
            logits = products(b_query, b_key, DTYPE, PRECISION, False) * factor
            if HAS_REL_K:
                logits += by_pair(
                    logits_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels,
                    is_there, logits_left[:, None], logits_right[:, None], HAS_RELATIONS,
                )  # fmt: skip
            logits = visible(
                logits, i2, j2, i0, j0, position, is_there, mask, mask_n, mask_m, IS_CAUSAL, MASK
            )
            weights = weights_of(logits, shift[:, None], log_total[:, None], MASK)
            grad_weights = products(b_grad_out, b_value, DTYPE, PRECISION, False)
            if HAS_REL_V:
                grad_weights += by_pair(
                    weights_by_label, i2, j2, i0, j0, first_row, position, left, right, row_width, labels,
                    is_there, weights_left[:, None], weights_right[:, None], HAS_RELATIONS,
                )  # fmt: skip
            if HAS_DROPOUT:
                is_kept = kept(seed, group, i0, j0, threshold, BLOCK_Q, NEAR_K, False)
                grad_weights = tl.where(is_kept, grad_weights * larger, 0.0)
            grad_logits = weights * (grad_weights - b_delta[:, None])
            if HAS_DROPOUT:
                weights = tl.where(is_kept, weights * larger, 0.0)
            if HAS_DISTANCES:
                # where one thread writes another has read
                tl.debug_barrier()
                distances = j2 - (position + i2)
                is_near = is_there & is_between(distances, left, right)
                is_left = distances <= -left
                is_right = is_last(distances, left, right)
                if HAS_REL_K:
                    at = diagonal(logit_sums, i2, j2, i0, j0, first_row, position, left, row_width)
                    tl.store(at, grad_logits, mask=is_near)
                    left_logit_sum += tl.sum(tl.where(is_left, grad_logits, 0.0), 1)
                    right_logit_sum += tl.sum(tl.where(is_right, grad_logits, 0.0), 1)
                if HAS_REL_V:
                    at = diagonal(weight_sums, i2, j2, i0, j0, first_row, position, left, row_width)
                    tl.store(at, weights, mask=is_near)
                    left_weight_sum += tl.sum(tl.where(is_left, weights, 0.0), 1)
                    right_weight_sum += tl.sum(tl.where(is_right, weights, 0.0), 1)
            elif HAS_RELATIONS and IS_DETERMINISTIC:
                few_logits += sum_few_labels(labels, grad_logits, first_label, FEW)
                few_weights += sum_few_labels(labels, weights, first_label, FEW)
            elif HAS_RELATIONS:
                if HAS_REL_K:
                    add_by_label(logit_sums, i2, i0, first_row, row_width, labels, grad_logits, is_there)
                if HAS_REL_V:
                    add_by_label(weight_sums, i2, i0, first_row, row_width, labels, weights, is_there)
            if first_label == 0:
                b_grad_query = product(grad_logits.to(b_key.dtype), b_key, b_grad_query, PRECISION)
        if HAS_RELATIONS and IS_DETERMINISTIC:
            rows = num_queries - i0
            if HAS_REL_K:
                at = logit_sums + first_row + first_label
                store_rows(at, few_logits, 0, rows, row_width, BLOCK_Q, FEW, FEW)
            if HAS_REL_V:
                at = weight_sums + first_row + first_label
                store_rows(at, few_weights, 0, rows, row_width, BLOCK_Q, FEW, FEW)

    if HAS_TABLES:
        tl.debug_barrier()
        if num_labels == 1:
            left_logit_sum += right_logit_sum
            left_weight_sum += right_weight_sum
        for first_label in range(0, num_labels, BLOCK_L):
            labels = (first_label + tl.arange(0, BLOCK_L))[None, :]
            at = first_row + tl.arange(0, BLOCK_Q)[:, None] * row_width + labels
            is_label = is_query[:, None] & (labels < num_labels)
            if HAS_DISTANCES:
                # of the labels between the outermost only those whose key exists were met
                j2 = position + i2 + labels - left
                is_met = is_label & is_between(labels - left, left, right) & (j2 >= 0) & (j2 < key_end)
                is_right = (labels == num_labels - 1) & (labels > 0)
                if HAS_REL_V:
                    weights = tl.load(weight_sums + at, mask=is_met, other=0.0)
                    weights = tl.where(labels == 0, left_weight_sum[:, None], weights)
                    weights = tl.where(is_right, right_weight_sum[:, None], weights)
                    tl.store(weight_sums + at, weights, mask=is_label)
                if HAS_REL_K:
                    grad_logits = tl.load(logit_sums + at, mask=is_met, other=0.0)
                    grad_logits = tl.where(labels == 0, left_logit_sum[:, None], grad_logits)
                    grad_logits = tl.where(is_right, right_logit_sum[:, None], grad_logits)
                    tl.store(logit_sums + at, grad_logits, mask=is_label)
            elif HAS_REL_K:
                grad_logits = tl.load(logit_sums + at, mask=is_label, other=0.0)
            if HAS_REL_K:
                b_table = load_rows(
                    rel_k, first_label, num_labels, rel_k_l, rel_k_d, BLOCK_L, D_K, PADDED_K, False
                )  # [labels, d_k]
                b_grad_query = product_with_table(
                    grad_logits, b_table, b_grad_query, b_query.dtype, PRECISION
                )
    store_rows(
        grad_query + batch * grad_query_b + head * grad_query_h,
        b_grad_query * widened(scale, scale_rest, DTYPE), i0, num_queries, grad_query_n,
        BLOCK_Q, D_K, PADDED_K,
    )  # fmt: skip
