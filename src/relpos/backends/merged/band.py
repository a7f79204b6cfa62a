"""The band of attention: the few distances around each query that have a row of the tables to themselves.

Query i meets the keys i + first to i + first + width - 1. Blocks of queries meet windows of keys, so that all
products are batched ones, and [query, width] is read off [block, window] along its diagonals without a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Band:
    """Where the band lies for `num_queries` queries among `num_keys` keys.

    Args:
        first: the key that query 0 meets first; it may lie outside the keys, as may the last.
        width: keys that each query meets.
    """

    num_queries: int
    num_keys: int
    first: int
    width: int

    @property
    def block(self) -> int:
        """Queries in a block: each pays for block + width keys, and each block for a window of its own."""
        return max(32, self.width // 4)

    @property
    def num_blocks(self) -> int:
        """Blocks of one sequence, the last of which holds zeros where there is no query."""
        return -(-self.num_queries // self.block)

    @property
    def spare(self) -> int:
        """Blocks behind a sequence that its last window reaches into."""
        return -(-(self.width - 1) // self.block)

    @property
    def window(self) -> int:
        """Keys that a block meets."""
        return self.block + self.width - 1

    def blocks(self, x: Tensor) -> Tensor:
        """Queries [group, query, dim] as [group * blocks, block, dim], with spare blocks of zeros between."""
        rows = (self.num_blocks + self.spare) * self.block
        return F.pad(x, (0, 0, 0, rows - self.num_queries)).reshape(-1, self.block, x.shape[2])

    def rows(self, x: Tensor, groups: int) -> Tensor:
        """The queries of blocks [group * blocks, block, dim]: [group, query, dim], a view."""
        return x.view(groups, -1, x.shape[2])[:, : self.num_queries]

    def windows(self, x: Tensor) -> Tensor:
        """Keys [group, key, dim] as [group * blocks, window, dim], which overlap; zeros where no key is."""
        groups, _, dim = x.shape
        stride = (self.num_blocks + self.spare) * self.block
        first, last = self._reached()
        # the window of the very last spare block ends behind the last sequence
        held = x.new_empty(groups * stride + self.window, dim)
        held[groups * stride :] = 0.0
        by_sequence = held[: groups * stride].view(groups, stride, dim)
        by_sequence[:, :first] = 0.0
        by_sequence[:, first : first + last - self._start] = x[:, self._start : last]
        by_sequence[:, first + last - self._start :] = 0.0
        blocks = groups * (self.num_blocks + self.spare)
        return held.as_strided((blocks, self.window, dim), (self.block * dim, dim, 1))

    def add_windows(self, x: Tensor, total: Tensor) -> None:
        """Add [group * blocks, window, dim] to total [batch, heads, key, dim] where `windows` reads it."""
        groups, dim = total.shape[0] * total.shape[1], total.shape[3]
        blocks = self.num_blocks + self.spare
        by_block = x.view(groups, blocks, self.window, dim)[:, : self.num_blocks]
        held = x.new_zeros(groups, blocks, self.block, dim)
        for i in range(0, self.window, self.block):
            piece = by_block[:, :, i : i + self.block]
            held[:, i // self.block :, : piece.shape[2]][:, : self.num_blocks].add_(piece)
        first, last = self._reached()
        summed = held.flatten(1, 2)[:, first : first + last - self._start]
        total[:, :, self._start : last].add_(summed.unflatten(0, total.shape[:2]))

    def add_diagonals(self, x: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Add scale * x[block, i, i + near] to total [group, query, width]."""
        for rows, diagonals in self._diagonals(x, total.shape[0]):
            total[:, rows].unflatten(1, diagonals.shape[1:3]).add_(diagonals, alpha=scale)

    def spread(self, x: Tensor) -> Tensor:
        """[group, query, width] along the diagonals of [group * blocks, block, window], zeros elsewhere."""
        out = x.new_zeros(x.shape[0] * (self.num_blocks + self.spare), self.block, self.window)
        for rows, diagonals in self._diagonals(out, x.shape[0]):
            diagonals.copy_(x[:, rows].unflatten(1, diagonals.shape[1:3]))
        return out

    def _diagonals(self, x: Tensor, groups: int) -> Iterator[tuple[slice, Tensor]]:
        """Queries and their diagonals, a view [group, blocks, query, width]: whole blocks, then the rest."""
        whole, rest = divmod(self.num_queries, self.block)
        by_sequence = x.view(groups, -1, self.block, self.window)
        for rows, first, blocks, length in (
            (slice(0, whole * self.block), 0, whole, self.block),
            (slice(whole * self.block, None), whole, 1, rest),
        ):
            if blocks * length:
                size = (groups, blocks, length, self.width)
                strides = (by_sequence.stride(0), by_sequence.stride(1), self.window + 1, 1)
                offset = x.storage_offset() + first * by_sequence.stride(1)
                yield rows, x.as_strided(size, strides, offset)

    def mask(self, x: Tensor, value: float) -> None:
        """Fill x [..., query, width] in place where no key is."""
        before = min(max(-self.first, 0), self.num_queries)
        after = min(max(self.num_keys - self.first - self.width + 1, 0), self.num_queries)
        for start, stop in ((0, before), (max(after, before), self.num_queries)):
            if start < stop:
                i = torch.arange(start, stop, device=x.device)[:, None]
                j = self.first + i + torch.arange(self.width, device=x.device)
                x[..., start:stop, :].masked_fill_((j < 0) | (j >= self.num_keys), value)

    @property
    def _start(self) -> int:
        """The first key that any query meets."""
        return min(max(self.first, 0), self.num_keys)

    def _reached(self) -> tuple[int, int]:
        """Where the first key that any query meets lies in a row of windows, and the end of those met."""
        last = min(max(self.first + self.num_queries + self.width - 1, self._start), self.num_keys)
        return self._start - self.first if last > self._start else 0, last
