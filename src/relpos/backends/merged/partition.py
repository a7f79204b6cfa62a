"""Attention cut into pieces: some queries of some heads with all their keys, small enough for scratch memory.

Each piece knows which of its pairs are far to the left or right, where one row of the tables serves them all,
and which are near.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.backends.merged import far, sdpa
from relpos.backends.merged.band import Band

# elements of scratch memory for one piece, unless a thread needs more: 16 MiB of float32
_SCRATCH = 4 << 20
# queries of one piece where there are more than twice as many; with far fewer the fused kernel is slower
_QUERIES = 2048
# the same on a GPU, which wants much work at once: the share of its memory that scratch of float32 may fill,
# the elements where nobody can say how much that is, and queries. All are guesses, and were never measured.
_SHARE_ON_GPU = 64
_SCRATCH_ON_GPU = 64 << 20
_QUERIES_ON_GPU = 16384
# further than any key from any query
_NO_END = 1 << 64


@dataclass(frozen=True)
class Piece:
    """Queries of some heads of some sequences, and the keys that exist for them.

    Args:
        start: position of its first query among the keys.
        left, right: distances from which on a far region reaches; no right one where `right` is None.

    Row 0 of the tables serves the left far region, the next rows one near distance each, the last the right
    far region.
    """

    batch: slice
    heads: slice
    key_heads: slice
    queries: slice
    num_keys: int
    start: int
    left: int
    right: int | None

    @property
    def num_queries(self) -> int:
        """Queries of each head."""
        return self.queries.stop - self.queries.start

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """Its queries in a tensor [batch, heads, query, ...]."""
        return self.batch, self.heads, self.queries

    @property
    def keys_where(self) -> tuple[slice, slice, slice]:
        """Its keys in a tensor [batch, key_heads, key, ...]."""
        return self.batch, self.key_heads, slice(0, self.num_keys)

    @property
    def num_rows(self) -> int:
        """Rows of the tables that it may use: the first ones."""
        return 1 + self.band.width + (self.right is not None)

    @property
    def far_rows(self) -> tuple[int, ...]:
        """The rows of the tables that serve far regions."""
        return (0,) if self.right is None else (0, -1)

    @property
    def far_parts(self) -> list[tuple[int, list[far.Part]]]:
        """Each far region by its row of the tables, in parts."""
        parts = [far.until(self.num_queries, self.num_keys, self.start - self.left)]
        if self.right is not None:
            parts.append(far.since(self.num_queries, self.num_keys, self.start + self.right))
        return list(zip(self.far_rows, parts, strict=True))

    @property
    def band(self) -> Band:
        """The pairs between, each distance with a row of its own."""
        last = 0 if self.right is None else self.right - 1
        width = max(0, self.left + last)
        return Band(self.num_queries, self.num_keys, self.start - self.left + 1, width)


class Problem(NamedTuple):
    """The arguments of attention as an operator takes them; see `relpos.relative_attention`.

    `starts` is query_start where that is a tensor, `start` where it is a number.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None
    starts: Tensor | None
    start: int
    key_lengths: Tensor | None
    left: int
    right: int
    is_causal: bool
    scale: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd has to save; `with_tensors` puts it back."""
        return self.query, self.key, self.value, self.rel_k, self.rel_v, self.starts, self.key_lengths

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "Problem":
        """The same problem with these tensors."""
        names = ("query", "key", "value", "rel_k", "rel_v", "starts", "key_lengths")
        fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return self._replace(**fields)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums: float32, or float64 where a tensor is."""
        tensors = (self.query, self.rel_k, self.rel_v)
        is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
        return torch.float64 if is_double else torch.float32

    @property
    def far_dtype(self) -> torch.dtype:
        """The dtype that the fused kernel is given."""
        return torch.float64 if self.dtype == torch.float64 else self.query.dtype

    @property
    def has_right(self) -> bool:
        """Whether there is a right far region, for some lengths."""
        return self._far_distances()[1] is not None

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def width(self) -> int:
        """The one width that the fused kernel wants for keys and values."""
        multiple = sdpa.kernel(self.query.device, self.far_dtype).multiple
        return -(-max(self.query.shape[3], self.value.shape[3]) // multiple) * multiple

    def on_host(self) -> "Problem":
        """The problem with starts and key lengths where Python can read them; waits for a GPU once."""
        given = {"starts": self.starts, "key_lengths": self.key_lengths}
        present = {name: x for name, x in given.items() if x is not None and x.device.type != "cpu"}
        if not present:
            return self
        fetched = torch.stack([x.long() for x in present.values()]).cpu()
        fields: dict[str, Any] = dict(zip(present, fetched, strict=True))
        return self._replace(**fields)

    def within_reach(self) -> tuple["Problem", int]:
        """The problem with the rows that a pair may use and no others, and the first of them.

        A side keeps one row more than that, so that a side of 0, which has no near distance, stays one.
        """
        starts = [self.start] if self.starts is None else self.starts.tolist()
        farthest_left = max(starts, default=0) + self.query.shape[2] - 1
        farthest_right = self.key.shape[2] - 1 - min(starts, default=0)
        left, right = (
            min(side, max(farthest, 0) + 1)
            for side, farthest in ((self.left, farthest_left), (self.right, farthest_right))
        )
        first, rows = self.left - left, left + right + 1
        rel_k, rel_v = (None if x is None else x.narrow(-2, first, rows) for x in (self.rel_k, self.rel_v))
        return self._replace(rel_k=rel_k, rel_v=rel_v, left=left, right=right), first

    def widened(self, x: Tensor) -> Tensor:
        """x with zeros up to that width."""
        missing = self.width - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def qkv(self, piece: Piece) -> far.QKV:
        """Query, key and value of a piece for each head, [batch, heads, length, width], in the far dtype."""
        query, key, value = self.query[piece.where], self.key[piece.keys_where], self.value[piece.keys_where]
        if self.num_groups > 1:
            key, value = (x.repeat_interleave(self.num_groups, 1) for x in (key, value))
        query, key, value = (self.widened(x).to(self.far_dtype) for x in (query, key, value))
        return query, key, value

    def rows(self, table: Tensor | None, piece: Piece) -> Tensor | None:
        """The rows of a table for a piece, [row, width] or [heads, row, width], in the dtype of sums."""
        if table is None:
            return None
        table = (table if table.dim() == 2 else table[piece.heads])[..., : piece.num_rows, :]
        return self.widened(table.to(self.dtype))

    def pieces(self) -> Iterator[Piece]:
        """Every piece, one after another; in a piece of no keys no query has one, in any other each does."""
        left, right = self._far_distances()
        for batch, start, length in self._sequences():
            for heads, key_heads, rows in self._cut(batch.stop - batch.start):
                for queries in self._queries(rows, start):
                    # no query sees a key behind the last one
                    num_keys = max(0, min(length, start + queries.stop)) if self.is_causal else length
                    yield Piece(
                        batch, heads, key_heads, queries, num_keys, start + queries.start, left, right
                    )

    def _queries(self, rows: int, start: int) -> Iterator[slice]:
        """All queries, so many at once; first those before all keys, which see none where it is causal."""
        num_queries = self.query.shape[2]
        first = min(max(0, -start), num_queries) if self.is_causal else 0
        if first > 0:
            yield slice(0, first)
        for i in range(first, num_queries, rows):
            yield slice(i, min(i + rows, num_queries))

    def _far_distances(self) -> tuple[int, int | None]:
        """How far left of a query one region begins, and how far right of it the other."""
        has_tables = self.rel_k is not None or self.rel_v is not None
        if self.is_causal:
            return (self.left if has_tables else 0), None
        # one row for all, or none: one region without end
        if not has_tables or self.left + self.right == 0:
            return -_NO_END, None
        return self.left, max(self.right, 1 - self.left)

    def _sequences(self) -> Iterator[tuple[slice, int, int]]:
        """Sequences that are alike, with the start and the number of keys."""
        batch, num_keys = self.query.shape[0], self.key.shape[2]
        if self.starts is None and self.key_lengths is None:
            if batch > 0:
                yield slice(0, batch), self.start, num_keys
            return
        starts = [self.start] * batch if self.starts is None else self.starts.tolist()
        lengths = [num_keys] * batch if self.key_lengths is None else self.key_lengths.tolist()
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            yield slice(b, b + 1), start, min(max(length, 0), num_keys)

    def _cut(self, batch: int) -> Iterator[tuple[slice, slice, int]]:
        """Heads, the key heads that serve them, and how many queries at once."""
        most, scratch, workers = self._room()
        rows = self.query.shape[2] if self.query.shape[2] <= 2 * most else most
        # so many tensors as wide as a head, and so many as wide as the tables
        elements = rows * 8 * (self.width + self.left + self.right + 1) * batch * self.num_groups
        # the fused kernel shares out its work by heads
        least = -(-workers // (batch * self.num_groups))
        step = max(least, scratch // max(elements, 1), 1)
        for i in range(0, self.key.shape[1], step):
            j = min(i + step, self.key.shape[1])
            yield slice(i * self.num_groups, j * self.num_groups), slice(i, j), max(rows, 1)

    def _room(self) -> tuple[int, int, int]:
        """Queries of one piece, elements of its scratch memory, and workers that want a head each."""
        device = self.query.device
        if device.type == "cpu":
            return _QUERIES, _SCRATCH, torch.get_num_threads()
        if not torch.cuda.is_available():
            return _QUERIES_ON_GPU, _SCRATCH_ON_GPU, 1
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        return _QUERIES_ON_GPU, num_bytes // _SHARE_ON_GPU // 4, 1
