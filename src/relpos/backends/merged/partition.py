"""Attention cut into pieces: some queries of some heads with all their keys, small enough for scratch memory.

A piece holds its part of each tensor, and its pairs in three: far to the left and far to the right, where one
row of the tables serves them all, and near.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.backends.merged import far
from relpos.backends.merged.band import Band
from relpos.backends.merged.problem import Problem

# elements of scratch memory for one piece, unless a thread needs more: 16 MiB of float32
_SCRATCH = 4 << 20
# queries of one piece where there are more than twice as many; with far fewer the fused kernel is slower
_QUERIES = 2048
# the same on a GPU, which wants much work at once: the share of its memory that scratch of float32 may fill,
# the elements where nobody can say how much that is, and queries. All are guesses, and were never measured.
_SHARE_ON_GPU = 64
_SCRATCH_ON_GPU = 64 << 20
_QUERIES_ON_GPU = 16384


@dataclass(frozen=True)
class Place:
    """Where a piece lies in the tensors of the whole problem, and in those of its results and gradients.

    Args:
        rows: those of its tables.
        num_keys: keys that exist for its queries, the first ones. Where there are none no query has a key,
            and otherwise each has one.
    """

    batch: slice
    heads: slice
    key_heads: slice
    queries: slice
    rows: slice
    num_keys: int

    def in_queries(self, x: Tensor) -> Tensor:
        """Its part of x [batch, heads, query, ...], a view."""
        return x[self.batch, self.heads, self.queries]

    def in_keys(self, x: Tensor) -> Tensor:
        """Its part of x [batch, key heads, key, ...], a view."""
        return x[self.batch, self.key_heads, : self.num_keys]

    def in_table(self, x: Tensor) -> Tensor:
        """Its rows of a table [row, dim] or [heads, row, dim], a view."""
        return x[self.rows] if x.dim() == 2 else x[self.heads, self.rows]


@dataclass(frozen=True)
class Piece:
    """Queries of some heads of some sequences, the keys that exist for them, and the rows of their tables.

    Row 0 serves the left far region, the next rows one near distance each, the last the right far region.

    Args:
        tensors: query, key and value of each head, [batch, heads, length, width], for the fused kernel.
        rel_k, rel_v: [row, width] or [heads, row, width], in the dtype of the sums.
        regions: the parts of each far region, by its row, 0 or -1.
        band: the pairs between, each distance with a row of its own.
        dtype: of the sums.
        num_groups: query heads that share one key head.
    """

    place: Place
    tensors: far.QKV
    rel_k: Tensor | None
    rel_v: Tensor | None
    regions: dict[int, list[far.Part]]
    band: Band
    dtype: torch.dtype
    scale: float
    num_groups: int

    @property
    def num_rows(self) -> int:
        """Rows of its tables."""
        return self.band.width + len(self.regions)

    def near(self, x: Tensor) -> Tensor:
        """The near distances of x [batch, heads, query, row], as a view [group, query, near]."""
        return x.view(-1, *x.shape[2:])[..., 1 : 1 + self.band.width]

    def widened(self, x: Tensor) -> Tensor:
        """x [..., dim] with zeros up to the width of its tensors."""
        return _widened(x, self.tensors[0].shape[-1])


def pieces(problem: Problem) -> Iterator[Piece]:
    """Every piece, one after another."""
    given = problem
    problem = problem.on_host().within_reach()
    left, right = problem.far_distances
    # distances with a row of their own
    width = max(0, left + (0 if right is None else right - 1))
    first_row = given.left - problem.left
    rows = slice(first_row, first_row + problem.num_regions + width)
    for batch, start, length in _sequences(problem):
        for heads, key_heads, step in _heads(problem, batch.stop - batch.start):
            for queries in _queries(problem, step, start):
                position = start + queries.start  # of the first query
                # no query sees a key behind the last one
                num_keys = max(0, min(length, start + queries.stop)) if problem.is_causal else length
                sizes = queries.stop - queries.start, num_keys
                regions = {0: far.until(*sizes, position - left)}
                if right is not None:
                    regions[-1] = far.since(*sizes, position + right)
                place = Place(batch, heads, key_heads, queries, rows, num_keys)
                yield _piece(problem, place, regions, Band(*sizes, position - left + 1, width))


def _sequences(problem: Problem) -> Iterator[tuple[slice, int, int]]:
    """Sequences that are alike, with the start and the number of keys."""
    batch, num_keys = problem.query.shape[0], problem.key.shape[2]
    if problem.starts is None and problem.key_lengths is None:
        if batch > 0:
            yield slice(0, batch), problem.start, num_keys
        return
    starts = [problem.start] * batch if problem.starts is None else problem.starts.tolist()
    lengths = [num_keys] * batch if problem.key_lengths is None else problem.key_lengths.tolist()
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        yield slice(b, b + 1), start, min(max(length, 0), num_keys)


def _heads(problem: Problem, batch: int) -> Iterator[tuple[slice, slice, int]]:
    """Heads, the key heads that serve them, and how many queries at once."""
    most, scratch, workers = room(problem.query.device)
    num_queries, groups = problem.query.shape[2], problem.num_groups
    step = num_queries if num_queries <= 2 * most else most
    # so many tensors as wide as a head, and so many as wide as the tables
    elements = step * 8 * (problem.width + problem.num_labels) * batch * groups
    # the fused kernel shares out its work by heads
    least = -(-workers // (batch * groups))
    key_heads = max(least, scratch // max(elements, 1), 1)
    for i in range(0, problem.key.shape[1], key_heads):
        j = min(i + key_heads, problem.key.shape[1])
        yield slice(i * groups, j * groups), slice(i, j), max(step, 1)


def room(device: torch.device) -> tuple[int, int, int]:
    """Queries of one piece, elements of its scratch memory, and workers that want a head each."""
    if device.type == "cpu":
        return _QUERIES, _SCRATCH, torch.get_num_threads()
    if not torch.cuda.is_available():
        return _QUERIES_ON_GPU, _SCRATCH_ON_GPU, 1
    num_bytes = torch.cuda.get_device_properties(device).total_memory
    return _QUERIES_ON_GPU, num_bytes // _SHARE_ON_GPU // 4, 1


def _queries(problem: Problem, step: int, start: int) -> Iterator[slice]:
    """All queries, so many at once; first those before all keys, which see none where it is causal."""
    num_queries = problem.query.shape[2]
    first = min(max(0, -start), num_queries) if problem.is_causal else 0
    if first > 0:
        yield slice(0, first)
    for i in range(first, num_queries, step):
        yield slice(i, min(i + step, num_queries))


def _piece(problem: Problem, place: Place, regions: dict[int, list[far.Part]], band: Band) -> Piece:
    query, key, value = (
        place.in_queries(problem.query),
        place.in_keys(problem.key),
        place.in_keys(problem.value),
    )
    if problem.num_groups > 1:
        key, value = (x.repeat_interleave(problem.num_groups, 1) for x in (key, value))
    width = problem.width
    query, key, value = (_widened(x, width) for x in (query, key, value))
    rel_k, rel_v = (
        None if x is None else _widened(place.in_table(x).to(problem.dtype), width)
        for x in (problem.rel_k, problem.rel_v)
    )
    return Piece(
        *(place, (query, key, value), rel_k, rel_v, regions, band),
        *(problem.dtype, problem.scale, problem.num_groups),
    )


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
