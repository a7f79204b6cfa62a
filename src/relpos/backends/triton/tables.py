"""Products with the tables: with their rows before the backward pass, for their gradients after it."""

import triton
import triton.language as tl

from relpos.backends.triton.block import dot, load_rows, place, store_rows, widened
from relpos.backends.triton.labels import dot_labels
from relpos.backends.triton.logits import logit_scale


@triton.jit(do_not_specialize=["num_queries", "num_labels"])
def prepare(
    query, rel_k, rel_v, out, rest, grad_out, lse, grad_lse, delta, logits_by_label, grad_weights_by_label,
    query_b, query_h, query_n, query_d,
    rel_k_h, rel_k_l, rel_k_d,
    rel_v_h, rel_v_l, rel_v_d,
    out_b, out_h, out_n, out_d,
    grad_out_b, grad_out_h, grad_out_n, grad_out_d,
    num_heads, num_queries, num_labels, row_width, scale, scale_rest,
    D_K: tl.constexpr, D_V: tl.constexpr, HAS_REL_K: tl.constexpr, HAS_REL_V: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_K: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Write delta = grad_out . out - grad_lse, logits of labels, and grad_out . rel_v of labels."""
    DTYPE: tl.constexpr = lse.dtype.element_ty
    block, batch, head = place(tl.cdiv(num_queries, BLOCK_Q), num_heads, False)
    group = batch * num_heads + head
    i0 = block * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    is_query = i < num_queries
    first_row = (group * num_queries + i0) * row_width
    by_query = group * num_queries + i
    has_key = tl.load(lse + by_query, mask=is_query, other=float("-inf")) != float("-inf")
    grad_out += batch * grad_out_b + head * grad_out_h
    # [block_q, d_v]
    b_grad_out = load_rows(grad_out, i0, num_queries, grad_out_n, grad_out_d, BLOCK_Q, D_V, PADDED_V, False)
    # what comes back to a query without a key may be no number
    b_grad_out = tl.where(has_key[:, None], b_grad_out, 0.0)
    out += batch * out_b + head * out_h
    # [block_q, d_v]
    b_out = load_rows(out, i0, num_queries, out_n, out_d, BLOCK_Q, D_V, PADDED_V, False).to(DTYPE)
    if HAS_REST:
        # the error of delta is that of all logits of a query alike, and so adds up in the tables' gradients
        rest += batch * out_b + head * out_h
        b_out += load_rows(rest, i0, num_queries, out_n, out_d, BLOCK_Q, D_V, PADDED_V, False).to(DTYPE)
    b_delta = tl.sum(b_grad_out.to(DTYPE) * b_out, 1)
    if HAS_GRAD_LSE:
        b_delta -= tl.load(grad_lse + by_query, mask=is_query, other=0.0)
    tl.store(delta + by_query, tl.where(has_key, b_delta, 0.0), mask=is_query)
    if HAS_REL_K:
        query += batch * query_b + head * query_h
        # [block_q, d_k]
        b_query = load_rows(query, i0, num_queries, query_n, query_d, BLOCK_Q, D_K, PADDED_K, False)
        dot_labels(
            b_query, rel_k + head * rel_k_h, rel_k_l, rel_k_d, logits_by_label, first_row, row_width,
            num_queries - i0, num_labels, logit_scale(scale, scale_rest, DTYPE, MASK),
            D_K, PADDED_K, BLOCK_Q, BLOCK_L, PRECISION,
        )  # fmt: skip
    if HAS_REL_V:
        dot_labels(
            b_grad_out, rel_v + head * rel_v_h, rel_v_l, rel_v_d, grad_weights_by_label, first_row, row_width,
            num_queries - i0, num_labels, tl.full([], 1.0, DTYPE),
            D_V, PADDED_V, BLOCK_Q, BLOCK_L, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_groups", "num_queries", "num_labels", "num_parts"])
def table_gradients(
    x, sums, lse, parts,
    x_b, x_h, x_n, x_d,
    num_heads, num_groups, num_queries, num_labels, row_width, num_parts, scale, scale_rest,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, IS_PER_HEAD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Write parts of the gradient of a table: scale times sums, turned, times x, for every so many blocks.

    Args:
        x: [batch, heads, query, WIDTH]: queries for the keys' table, grad_out for the values'.
        parts: [num_parts, 1 or heads, num_labels, WIDTH], float32 or float64, to be added up.
        num_groups: sequences times heads that one table serves.
    """
    DTYPE: tl.constexpr = parts.dtype.element_ty
    num_label_blocks = tl.cdiv(num_labels, BLOCK_L)
    program = tl.program_id(0)
    first_label = (program % num_label_blocks) * BLOCK_L
    part = program // num_label_blocks % num_parts
    table = program // num_label_blocks // num_parts
    blocks = tl.cdiv(num_queries, BLOCK_Q)
    b_part = tl.zeros([BLOCK_L, PADDED], DTYPE)
    for t in range(part, num_groups * blocks, num_parts):
        i0 = t % blocks * BLOCK_Q
        if IS_PER_HEAD:
            batch = (t // blocks).to(tl.int64)
            head = table.to(tl.int64)
        else:
            batch = (t // blocks // num_heads).to(tl.int64)
            head = (t // blocks % num_heads).to(tl.int64)
        group = batch * num_heads + head
        i = i0 + tl.arange(0, BLOCK_Q)
        # [block_q, width]
        b_x = load_rows(
            x + batch * x_b + head * x_h, i0, num_queries, x_n, x_d, BLOCK_Q, WIDTH, PADDED, False
        )
        # a query without a key may bring what is no number
        has_key = tl.load(lse + group * num_queries + i, mask=i < num_queries, other=float("-inf"))
        b_x = tl.where((has_key != float("-inf"))[:, None], b_x, 0.0)
        first_row = (group * num_queries + i0) * row_width
        labels = first_label + tl.arange(0, BLOCK_L)
        at = sums + first_row + tl.arange(0, BLOCK_Q)[:, None] * row_width + labels[None, :]
        is_there = (i < num_queries)[:, None] & (labels < num_labels)[None, :]
        # [block_q, block_l]
        b_sums = tl.load(at, mask=is_there, other=0.0)
        b_part = dot(tl.trans(b_sums).to(b_x.dtype), b_x, b_part, PRECISION)
    num_tables = num_heads if IS_PER_HEAD else 1
    parts += (part * num_tables + table).to(tl.int64) * num_labels * WIDTH
    store_rows(
        parts, b_part * widened(scale, scale_rest, DTYPE), first_label, num_labels, WIDTH,
        BLOCK_L, WIDTH, PADDED,
    )  # fmt: skip
