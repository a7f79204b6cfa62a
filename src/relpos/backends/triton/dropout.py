"""Dropout: which weights a seed drops. The CPU kernel draws the same."""

import triton
import triton.language as tl


@triton.jit
def dropped(
    seed, group, first_query, first_key, threshold,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Whether each weight is dropped: bool [block_q, block_k], or turned [block_k, block_q].

    Philox4x32-10 (Salmon et al. 2011) with counter (query, key / 4, batch and head) and key `seed`. The four
    numbers of one counter belong to four consecutive keys. first_key is a multiple of 4.
    """
    rows = first_query + tl.arange(0, BLOCK_Q)
    fours = first_key // 4 + tl.arange(0, BLOCK_K // 4)
    zeros = tl.zeros([BLOCK_Q, BLOCK_K // 4], tl.int32)
    r0, r1, r2, r3 = tl.philox(
        tl.load(seed), zeros + rows[:, None], zeros + fours[None, :], zeros + group.to(tl.int32), zeros
    )
    numbers = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    # int64: with a probability of 1 every number is below the threshold 2^32
    is_dropped = numbers.to(tl.int64) < threshold
    if IS_TURNED:
        is_dropped = tl.trans(is_dropped)
    return is_dropped
