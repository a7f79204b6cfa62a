"""What the kernels share: where a program works, tiles, logits of a block of queries and a block of keys.

Positions are those of keys. A distance is key minus query, and a label is the row of the tables: `left` for
distance 0, 0 for all that is left or more before, left + right for all that is right or more after.
In shapes, q = BLOCK_Q queries, k = BLOCK_K keys.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# what differs from call to call, and must not make Triton compile a kernel once more
COUNTS = ["num_queries", "num_keys", "start", "left", "right", "peaks_size", "threshold"]
# the interpreter holds bfloat16 as integers, which its products take for numbers
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b, in the dtype of total; a and b have one dtype."""
    if IS_INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def product_with_table(x, b_table, total, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """total + x @ b_table, x rounded to DTYPE, which is that of queries; no table is rounded to 16 bits.

    A table of float32 meets them as the sum of two of 16 bits, which are fast and hold it to 2^-17 or better.
    """
    x = x.to(DTYPE)
    high = b_table.to(DTYPE)
    total = product(x, high, total, PRECISION)
    if b_table.dtype.primitive_bitwidth > DTYPE.primitive_bitwidth:
        total = product(x, (b_table - high.to(b_table.dtype)).to(DTYPE), total, PRECISION)
    return total


@triton.jit
def widened(x, rest, DTYPE: tl.constexpr):
    """A number of the host in DTYPE: it comes as float32, and what that cannot hold comes as rest."""
    return tl.to_tensor(x).to(DTYPE) + tl.to_tensor(rest).to(DTYPE)


@triton.jit
def offset(index, stride):
    """index * stride as int64; within a block int32 holds such products, which takes half the registers."""
    return tl.to_tensor(index).to(tl.int64) * stride


@triton.jit
def load_rows(
    base, first, num_rows, row_stride, column_stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + BLOCK) as [BLOCK, PADDED]; zeros behind num_rows and behind WIDTH.

    IS_WHOLE says that all these rows exist.
    """
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    at = base + offset(first, row_stride) + (rows * row_stride + columns * column_stride)
    if IS_WHOLE and WIDTH == PADDED:
        return tl.load(at)
    if IS_WHOLE:
        return tl.load(at, mask=columns < WIDTH, other=0.0)
    if WIDTH == PADDED:
        return tl.load(at, mask=rows < num_rows - first, other=0.0)
    return tl.load(at, mask=(rows < num_rows - first) & (columns < WIDTH), other=0.0)


@triton.jit
def store_rows(
    base, x, first, num_rows, row_stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Write x [BLOCK, PADDED] to rows [first, first + BLOCK), of which num_rows exist."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    at = base + offset(first, row_stride) + (rows * row_stride + columns)
    tl.store(at, x.to(base.dtype.element_ty), mask=(rows < num_rows - first) & (columns < WIDTH))


@triton.jit
def place(num_blocks, num_heads, BACKWARDS: tl.constexpr):
    """(block, batch, head) of this program; with BACKWARDS the last block, being the longest, comes first."""
    program = tl.program_id(0)
    block = program % num_blocks
    if BACKWARDS:
        block = num_blocks - 1 - block
    group = program // num_blocks
    # as int64, since they are multiplied by strides
    return block, (group // num_heads).to(tl.int64), (group % num_heads).to(tl.int64)


@triton.jit
def first_position(start, starts, batch, reach, HAS_STARTS: tl.constexpr):
    """Position of query 0. What lies beyond `reach` makes no difference, and overflows nothing."""
    if HAS_STARTS:
        position = tl.load(starts + batch)
        return tl.minimum(tl.maximum(position, -reach), reach).to(tl.int32)
    return start


@triton.jit
def existing_keys(num_keys, key_lengths, batch, HAS_LENGTHS: tl.constexpr):
    """How many keys this sequence has."""
    if HAS_LENGTHS:
        length = tl.load(key_lengths + batch)
        return tl.minimum(tl.maximum(length, 0), num_keys).to(tl.int32)
    return num_keys


@triton.jit
def whole_blocks(count, BLOCK: tl.constexpr):
    """How many blocks fit into count, which may be negative."""
    return tl.maximum(count, 0) // BLOCK


@triton.jit
def blocks_over(count, BLOCK: tl.constexpr):
    """How many blocks cover count, which may be negative."""
    return (tl.maximum(count, 0) + BLOCK - 1) // BLOCK


@triton.jit
def parts_of_keys(
    first, key_end, left, right, HAS_TABLES: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(near_begin, near_end, far_end, key_end): where the keys of a block of queries are far, near, and end.

    Whole blocks of keys in [0, near_begin) are far to the left of every query, and all have one label; those
    in [near_end, far_end) are far to the right. The rest may be anything: [near_begin, near_end), which is
    whole blocks, and [far_end, key_end), which is less than one.

    Args:
        first: position of the first query.
    """
    last = first + BLOCK_Q - 1
    if IS_CAUSAL:
        key_end = tl.maximum(tl.minimum(key_end, last + 1), 0)
    far_end = whole_blocks(key_end, BLOCK_K) * BLOCK_K
    near_begin = far_end
    near_end = far_end
    if HAS_RELATIONS:
        near_begin = far_end * 0
    elif HAS_TABLES:
        near_begin = tl.minimum(whole_blocks(first - left + 1, BLOCK_K) * BLOCK_K, far_end)
        near_end = tl.minimum(tl.maximum(blocks_over(last + right, BLOCK_K) * BLOCK_K, near_begin), far_end)
    elif IS_CAUSAL:
        near_begin = tl.minimum(whole_blocks(first + 1, BLOCK_K) * BLOCK_K, far_end)
    return near_begin, near_end, far_end, key_end


@triton.jit
def kept(
    seed, group, first_query, first_key, threshold,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Which weights stay when some are dropped, bool [q, k] or turned [k, q]: as the CPU kernel draws them.

    Philox4x32-10 (Salmon et al. 2011) with counter (query, key / 4, batch and head) and key `seed`; the four
    numbers that it gives are those of four keys in a row. first_key is a multiple of 4.
    """
    rows = first_query + tl.arange(0, BLOCK_Q)
    fours = first_key // 4 + tl.arange(0, BLOCK_K // 4)
    zeros = tl.zeros([BLOCK_Q, BLOCK_K // 4], tl.int32)
    r0, r1, r2, r3 = tl.philox(
        tl.load(seed), zeros + rows[:, None], zeros + fours[None, :], zeros + group.to(tl.int32), zeros
    )
    numbers = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    # as int64: a probability of 1 has a threshold that no number reaches
    is_kept = numbers.to(tl.int64) >= threshold
    if IS_TURNED:
        is_kept = tl.trans(is_kept)
    return is_kept


# What follows takes queries i and keys j as [q, 1] and [1, k], or turned as [1, q] and [k, 1].
@triton.jit
def pair_addresses(base, i, j, i0, j0, query_stride, key_stride):
    """Addresses of what is given for each pair of a block, whose first query is i0 and first key j0."""
    base += offset(i0, query_stride) + offset(j0, key_stride)
    return base + ((i - i0) * query_stride + (j - j0) * key_stride)


@triton.jit
def pair_labels(relations, i, j, i0, j0, is_there, query_stride, key_stride):
    """Labels that relations give to pairs, -1 where there is none."""
    at = pair_addresses(relations, i, j, i0, j0, query_stride, key_stride)
    return tl.load(at, mask=is_there, other=-1).to(tl.int32)


@triton.jit
def is_between(distances, left, right):
    """Whether a label lies between the outermost, so that a query meets it once."""
    return (distances > -left) & (distances < right)


@triton.jit
def is_last(distances, left, right):
    """Whether a label is the last; where there is one label, that is the first, and no last."""
    return (distances >= right) & (distances > -left)


@triton.jit
def diagonal(by_label, i, j, i0, j0, first_row, position, left, row_width):
    """Addresses in by_label of the pairs of a block, whose distances have labels of their own.

    Label and distance grow together along the keys and shrink along the queries, so what a block meets is a
    tile with rows of row_width - 1. first_row is where the row of query i0 begins.
    """
    base = by_label + first_row + (j0 - position - i0 + left)
    return base + (i - i0) * (row_width - 1) + (j - j0)


@triton.jit
def masked(logits, mask, i, j, i0, j0, is_there, query_stride, key_stride, MASK: tl.constexpr):
    """Logits under a mask: bool, or numbers that are added."""
    at = pair_addresses(mask, i, j, i0, j0, query_stride, key_stride)
    if MASK == "bool":
        return tl.where(tl.load(at, mask=is_there, other=0) != 0, logits, float("-inf"))
    return logits + tl.load(at, mask=is_there, other=0.0).to(logits.dtype)


# Logits are in base 2, which saves a product for each pair. Not under a mask of numbers: what other libraries
# write for -inf would not fit.
@triton.jit
def logit_scale(scale, scale_rest, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Factor of products of query and key."""
    if MASK == "float":
        return widened(scale, scale_rest, DTYPE)
    return widened(scale, scale_rest, DTYPE) * LOG2E


@triton.jit
def power(x, MASK: tl.constexpr):
    """The exponential of a difference of logits."""
    if MASK == "float":
        # what is smaller is 0 all the same, and the product would overflow
        return tl.exp2(tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL) * LOG2E)
    return tl.exp2(x)


@triton.jit
def log_sum_exp(peak, total, MASK: tl.constexpr):
    """In nats, of logits whose largest is peak and whose powers beneath it sum to total."""
    if MASK == "float":
        return peak + tl.log2(total) * LN2
    return (peak + tl.log2(total)) * LN2


@triton.jit
def products(b_query, b_key, DTYPE: tl.constexpr, PRECISION: tl.constexpr, IS_TURNED: tl.constexpr):
    """query . key [q, k], or turned [k, q]."""
    # one return: all that a function has are compared
    if IS_TURNED:
        total = tl.zeros([b_key.shape[0], b_query.shape[0]], DTYPE)
        total = product(b_key, tl.trans(b_query), total, PRECISION)
    else:
        total = tl.zeros([b_query.shape[0], b_key.shape[0]], DTYPE)
        total = product(b_query, tl.trans(b_key), total, PRECISION)
    return total


@triton.jit
def by_pair(
    by_label, i, j, i0, j0, first_row, position, left, right, row_width, labels, is_there, of_left, of_right,
    HAS_RELATIONS: tl.constexpr,
):  # fmt: skip
    """What each pair finds under its label in by_label; of_left and of_right [of i] are the outermost."""
    if HAS_RELATIONS:
        at = by_label + first_row + (i - i0) * row_width + labels
        return tl.load(at, mask=is_there & (labels >= 0), other=0.0)
    distances = j - (position + i)
    at = diagonal(by_label, i, j, i0, j0, first_row, position, left, row_width)
    found = tl.load(at, mask=is_there & is_between(distances, left, right), other=0.0)
    return tl.where(distances <= -left, of_left, tl.where(is_last(distances, left, right), of_right, found))


@triton.jit
def visible(
    logits, i, j, i0, j0, position, is_there, mask, mask_n, mask_m,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Logits, -inf where a pair may not attend."""
    if MASK != "none":
        logits = masked(logits, mask, i, j, i0, j0, is_there, mask_n, mask_m, MASK)
    if IS_CAUSAL:
        is_there = is_there & (j <= position + i)
    return tl.where(is_there, logits, float("-inf"))


@triton.jit
def label_products(
    b_x, table, row_stride, column_stride, by_label, first_row, row_width, num_rows, num_labels, factor,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write factor * x . table[label] for each label to the rows of by_label; x is [BLOCK_Q, PADDED]."""
    i = tl.arange(0, BLOCK_Q)
    for first in range(0, num_labels, BLOCK_L):
        b_table = load_rows(
            table, first, num_labels, row_stride, column_stride, BLOCK_L, WIDTH, PADDED, False
        )  # [labels, d]
        labels = first + tl.arange(0, BLOCK_L)
        found = tl.zeros([BLOCK_Q, BLOCK_L], by_label.dtype.element_ty)
        found = product_with_table(b_x, tl.trans(b_table), found, b_x.dtype, PRECISION) * factor
        at = by_label + first_row + i[:, None] * row_width + labels[None, :]
        tl.store(at, found, mask=(i < num_rows)[:, None] & (labels < num_labels)[None, :])


@triton.jit
def add_by_label(sums, i, i0, first_row, row_width, labels, x, is_there):
    """Add x of each pair to the sum of its label. No other program has these rows; its threads share them."""
    at = sums + first_row + (i - i0) * row_width + labels
    tl.atomic_add(at, x, mask=is_there & (labels >= 0), sem="relaxed", scope="cta")


@triton.jit
def sum_few_labels(labels, x, first, FEW: tl.constexpr):
    """Sums of x [q, k] over the keys of each of FEW labels from `first` on: [q, FEW], in a fixed order."""
    few = first + tl.arange(0, FEW)
    return tl.sum(tl.where(labels[:, :, None] == few[None, None, :], x[:, :, None], 0.0), 1)
