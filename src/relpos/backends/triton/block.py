"""What every kernel does with tiles: find its place, load and store rows, multiply.

In shapes block_q and block_k are the queries and the keys of a tile.
"""

import triton
import triton.language as tl

# arguments that differ from call to call: Triton must not compile a kernel again for each value
COUNTS = ["num_queries", "num_keys", "start", "left", "right", "row_stats_size", "threshold"]
# the interpreter holds bfloat16 as integers, which its dot_pairs take for numbers
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, in the dtype of acc; a and b have one dtype."""
    if IS_INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def dot_with_table(x, b_table, acc, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ b_table, with x rounded to DTYPE, the dtype of queries. A table is never rounded to 16 bits.

    A float32 table beside 16-bit queries is split into two 16-bit tables whose sum is exact to 2^-17.
    """
    x = x.to(DTYPE)
    high = b_table.to(DTYPE)
    acc = dot(x, high, acc, PRECISION)
    if b_table.dtype.primitive_bitwidth > DTYPE.primitive_bitwidth:
        acc = dot(x, (b_table - high.to(b_table.dtype)).to(DTYPE), acc, PRECISION)
    return acc


@triton.jit
def widened(x, rest, DTYPE: tl.constexpr):
    """A number of the host in DTYPE. It is passed as a float32 and the remainder that float32 cannot hold."""
    return tl.to_tensor(x).to(DTYPE) + tl.to_tensor(rest).to(DTYPE)


@triton.jit
def offset(index, stride):
    """index * stride as int64; within a block int32 holds such dot_pairs, which takes half the registers."""
    return tl.to_tensor(index).to(tl.int64) * stride


@triton.jit
def load_rows(
    base, first, num_rows, row_stride, column_stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + BLOCK) as [BLOCK, PADDED]; zeros beyond num_rows and beyond WIDTH.

    IS_WHOLE promises that all these rows exist.
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
    """Write x [BLOCK, PADDED] to those of the rows [first, first + BLOCK) that exist."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    at = base + offset(first, row_stride) + (rows * row_stride + columns)
    tl.store(at, x.to(base.dtype.element_ty), mask=(rows < num_rows - first) & (columns < WIDTH))


@triton.jit
def place(num_blocks, num_heads, BACKWARDS: tl.constexpr):
    """(block, batch, head) of this program. With BACKWARDS the last block, the longest one, comes first."""
    program = tl.program_id(0)
    block = program % num_blocks
    if BACKWARDS:
        block = num_blocks - 1 - block
    group = program // num_blocks
    # int64, because they are multiplied by strides
    return block, (group // num_heads).to(tl.int64), (group % num_heads).to(tl.int64)
