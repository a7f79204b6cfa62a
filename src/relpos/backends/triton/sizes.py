"""Sizes of blocks, warps and stages for each kernel, by what it is compiled for.

The first of each list is taken: in 16 bits at widths up to 64 the largest that spills no registers, beyond
that one that spills few, in float32 and float64 one that compiles and runs; for compute capability 8.0 within
the 99 KiB of shared memory that every GPU from then on gives a program. What benchmarks/kernel_resources.py
reports is all that is known: none was timed on a GPU. RELPOS_TRITON_TUNE=1 tries the others (tuning.py).

A tile of queries and near keys must have at least one pair for each thread of its program: what is read along
diagonals and written back there is safe between threads only while no two hold the same pair.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

# labels whose products with a block of queries are found at once, and those that are summed at once where the
# order of sums must not change
LABELS, FEW_LABELS = 16, 4


class Size(NamedTuple):
    """How one kernel is cut up.

    Args:
        queries, keys: of a block; of the kernel for tables, queries and labels.
        near: keys, or queries, of a block in which labels or ends must be looked at, which takes registers.
        warps: of a program. stages: blocks that are loaded ahead, and the one at work.
    """

    queries: int
    keys: int
    near: int = 16
    warps: int = 8
    stages: int = 2


class Kind(NamedTuple):
    """What sizes depend on.

    Args:
        itemsize: bytes of a number. width: of heads, padded.
        is_general: whether a mask, a label or a random number is read for each pair.
        is_grouped: whether several query heads share a key head.
        has_one_table: whether there is one of the two tables.
        has_float_mask: whether the mask is of numbers, which take more memory and registers than bools.
    """

    itemsize: int
    width: int
    is_general: bool = False
    is_grouped: bool = False
    has_one_table: bool = False
    has_float_mask: bool = False


def padded(width: int) -> int:
    """The power of two that holds the width of a head; a product of tiles takes no less than 16."""
    return max(16, 1 << (width - 1).bit_length())


# kernel -> bytes of a number -> width up to -> candidates, plain and general
CANDIDATES: dict[str, dict[int, dict[int, tuple[list[Size], list[Size]]]]] = {
    "forward": {
        2: {
            64: (
                [Size(128, 64, stages=3), Size(64, 64, warps=4, stages=3), Size(128, 128)],
                [Size(128, 64, stages=3)],
            ),
            128: ([Size(128, 64), Size(64, 64)], [Size(64, 64)]),
            256: ([Size(64, 32), Size(32, 64)], [Size(32, 32, stages=1)]),
        },
        4: {
            64: ([Size(64, 32), Size(64, 64)], [Size(32, 32)]),
            128: ([Size(32, 32)], [Size(32, 32, stages=1)]),
            256: ([Size(16, 16, stages=1), Size(32, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
        8: {
            64: ([Size(32, 16, stages=1)], [Size(16, 16, stages=1)]),
            128: ([Size(16, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
    },
    "key_value_gradients": {
        2: {
            64: ([Size(64, 64), Size(64, 64, warps=4), Size(64, 128)], [Size(32, 32)]),
            128: ([Size(32, 64), Size(64, 64)], [Size(32, 32)]),
            256: ([Size(32, 32, stages=1)], [Size(16, 32, stages=1)]),
        },
        4: {
            64: ([Size(32, 64), Size(32, 32)], [Size(32, 32)]),
            128: ([Size(16, 32, stages=1), Size(32, 32, stages=1)], [Size(16, 32, stages=1)]),
            256: ([Size(16, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
        8: {
            64: ([Size(16, 32, stages=1)], [Size(16, 16, stages=1)]),
            128: ([Size(16, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
    },
    "query_gradients": {
        2: {
            64: ([Size(128, 64), Size(64, 64), Size(64, 64, warps=4)], [Size(64, 32)]),
            128: ([Size(64, 64), Size(64, 32)], [Size(32, 32, stages=1)]),
            256: ([Size(32, 32, stages=1)], [Size(32, 32, stages=1)]),
        },
        4: {
            64: ([Size(64, 32), Size(64, 32, stages=1)], [Size(32, 32)]),
            128: ([Size(32, 16, warps=4, stages=1), Size(32, 32, stages=1)], [Size(32, 16, stages=1)]),
            256: ([Size(16, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
        8: {
            64: ([Size(32, 16, stages=1)], [Size(16, 16, stages=1)]),
            128: ([Size(16, 16, stages=1)], [Size(16, 16, stages=1)]),
        },
    },
}  # fmt: skip


def candidates(kernel: str, kind: Kind) -> list[Size]:
    """Of a kernel that meets pairs, the best guess first."""
    by_width = CANDIDATES[kernel][kind.itemsize]
    plain, general = next(found for width, found in by_width.items() if kind.width <= width)
    some = general if kind.is_general else plain
    if kernel == "key_value_gradients" and kind.is_grouped and not kind.is_general:
        # the loop over heads takes a few registers more
        some = [size._replace(keys=max(size.keys // 2, 16)) for size in some]
    is_tight = kernel == "query_gradients" and kind.has_one_table and not kind.is_general
    return [halved(size) for size in some] if is_tight or kind.has_float_mask else some


def kinds() -> Iterator[Kind]:
    """Every kind that there is."""
    for itemsize, widths in ((2, (64, 128, 256)), (4, (64, 128, 256)), (8, (64, 128))):
        for width in widths:
            for flags in product((False, True), repeat=4):
                yield Kind(itemsize, width, *flags)


def halved(size: Size) -> Size:
    """With half as many queries in a block, and no more than one loaded ahead."""
    return size._replace(queries=max(size.queries // 2, 16), stages=min(size.stages, 2))


def interpreted(longest: int) -> Size:
    """Few blocks: a block takes the interpreter as long whatever its size."""
    if longest <= 64:
        return Size(32, 32, 32)
    return Size(128, 128, 128) if longest <= 1024 else Size(256, 256, 256)


def rows(kind: Kind) -> Size:
    """Of the kernels that go once over all queries, prepare and table_gradients; keys are labels."""
    if kind.itemsize * kind.width <= 256:
        # exact products of float32 spill in fewer warps
        return Size(64, 32, warps=4) if kind.itemsize == 2 else Size(64, 16, warps=8, stages=1)
    return Size(32, 16, warps=4, stages=1)


def num_parts(num_blocks: int, num_tables: int) -> int:
    """How many programs share the blocks of queries for a table: enough to keep a GPU busy, and no more."""
    return torch.sym_max(1, torch.sym_min(num_blocks, 256 // num_tables))
