"""Which keys are near a block of queries and which are far, and the same for queries around a block of keys.

Positions are those of keys. The keys of a far block all lie `left` or more before, or `right` or more after,
all queries: every pair has the tables' first row (far left) or their last (far right). All other blocks are
near, also the last one if it is not whole.
"""

import triton
import triton.language as tl


@triton.jit
def first_position(start, starts, batch, reach, HAS_STARTS: tl.constexpr):
    """Position of query 0, clipped to +-reach: beyond that nothing changes, and nothing overflows."""
    if HAS_STARTS:
        position = tl.load(starts + batch)
        return tl.minimum(tl.maximum(position, -reach), reach).to(tl.int32)
    return start


@triton.jit
def existing_keys(num_keys, key_lengths, batch, HAS_LENGTHS: tl.constexpr):
    """Number of keys of this sequence."""
    if HAS_LENGTHS:
        length = tl.load(key_lengths + batch)
        return tl.minimum(tl.maximum(length, 0), num_keys).to(tl.int32)
    return num_keys


@triton.jit
def whole_blocks(count, BLOCK: tl.constexpr):
    """Number of blocks that fit into count, which may be negative."""
    return tl.maximum(count, 0) // BLOCK


@triton.jit
def blocks_over(count, BLOCK: tl.constexpr):
    """Number of blocks that cover count, which may be negative."""
    return (tl.maximum(count, 0) + BLOCK - 1) // BLOCK


@triton.jit
def key_ranges(
    first, key_end, left, right, HAS_TABLES: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(near_begin, near_end, far_end, key_end) of the keys of a block of queries.

        [0, near_begin)        far left
        [near_begin, near_end) near
        [near_end, far_end)    far right
        [far_end, key_end)     near: the last block, which is not whole

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
def query_ranges(
    first, num_queries, left, right, is_whole, HAS_TABLES: tl.constexpr, HAS_RELATIONS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(far_right_end, near_begin, near_end, far_end) of the queries of a block of keys.

        [0, far_right_end)            the keys are far right of these queries
        [far_right_end, near_begin)   these queries see none of the keys
        [near_begin, near_end)        near
        [near_end, far_end)           the keys are far left of these queries
        [far_end, num_queries)        near: the last block, which is not whole

    Args:
        first: position of the first key, from that of query 0.
        is_whole: whether all keys of the block exist.
    """
    last = first + BLOCK_K - 1
    far_end = whole_blocks(num_queries, BLOCK_Q) * BLOCK_Q
    far_right_end = far_end * 0
    near_begin = far_end * 0
    near_end = far_end
    if IS_CAUSAL:
        near_begin = tl.minimum(whole_blocks(first, BLOCK_Q) * BLOCK_Q, far_end)
    if is_whole and not HAS_RELATIONS:
        if HAS_TABLES or IS_CAUSAL:
            near_end = tl.minimum(blocks_over(last + left, BLOCK_Q) * BLOCK_Q, far_end)
            if not IS_CAUSAL:
                far_right_end = tl.minimum(whole_blocks(first - right + 1, BLOCK_Q) * BLOCK_Q, near_end)
        else:
            near_end = far_end * 0
    near_begin = tl.maximum(far_right_end, near_begin)
    near_end = tl.maximum(near_end, near_begin)
    return far_right_end, near_begin, near_end, far_end
