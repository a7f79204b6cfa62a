"""One number for each label, spread over the pairs that have it; and numbers of pairs, summed by label.

Each is the other's transpose. A tensor of labels for all pairs serves anything; where labels are clipped
distances, most of a row shares its first or its last label, and only a band of pairs needs a look.
In shapes, group = batch * heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# queries at a time: a band is as wide as these and both clip distances together
BLOCK = 64


class Pairs(Protocol):
    """The labels of all pairs."""

    @property
    def is_fresh(self) -> bool:
        """Whether what `spread` returns is no view, and may be changed at no cost to autograd."""

    def spread(self, by_label: Tensor) -> Tensor:
        """[group, query, key] of [group, query, labels]."""

    def collect(self, by_pair: Tensor, num_labels: int) -> Tensor:
        """[group, query, labels] of [group, query, key]."""


@dataclass(frozen=True)
class Labelled:
    """Pairs with any labels, int64 [batch, heads, query, key]; in any graph and under any transform."""

    labels: Tensor
    is_fresh = False

    def spread(self, by_label: Tensor) -> Tensor:
        """The number of each pair's label."""
        return by_label.view(*self.labels.shape[:3], by_label.shape[2]).gather(-1, self.labels).flatten(0, 1)

    def collect(self, by_pair: Tensor, num_labels: int) -> Tensor:
        """The sum over the pairs of each label."""
        zeros = by_pair.new_zeros(*self.labels.shape[:3], num_labels)
        return zeros.scatter_add(-1, self.labels, by_pair.view(self.labels.shape)).flatten(0, 1)


@dataclass(frozen=True)
class Clipped:
    """Pairs whose label is clip(key - (start + query), -left, right) + left, by blocks of queries."""

    num_keys: int
    start: int
    left: int
    right: int
    is_fresh = True

    def spread(self, by_label: Tensor) -> Tensor:
        """The number of each pair's label."""
        return _Spread.apply(by_label, self)

    def collect(self, by_pair: Tensor, num_labels: int) -> Tensor:
        """The sum over the pairs of each label."""
        assert num_labels == self.left + self.right + 1
        return _Collect.apply(by_pair, self)

    def spread_now(self, by_label: Tensor) -> Tensor:
        """`spread`, without its gradient."""
        by_pair = by_label.new_empty(*by_label.shape[:2], self.num_keys)
        for rows, first, last, labels in self._blocks(by_label):
            numbers, out = by_label[:, rows], by_pair[:, rows]
            out[..., :first] = numbers[..., :1]
            out[..., first:last] = numbers.gather(-1, labels)
            out[..., last:] = numbers[..., -1:]
        return by_pair

    def collect_now(self, by_pair: Tensor) -> Tensor:
        """`collect`, without its gradient."""
        by_label = by_pair.new_zeros(*by_pair.shape[:2], self.left + self.right + 1)
        for rows, first, last, labels in self._blocks(by_pair):
            numbers, out = by_pair[:, rows], by_label[:, rows]
            out.scatter_add_(-1, labels, numbers[..., first:last])
            out[..., 0] += numbers[..., :first].sum(-1)
            out[..., -1] += numbers[..., last:].sum(-1)
        return by_label

    def _blocks(self, like: Tensor) -> Iterator[tuple[slice, int, int, Tensor]]:
        """Rows, the keys `first` to `last`, and their labels; keys before have label 0, others the last."""
        group, num_queries, _ = like.shape
        for begin in range(0, num_queries, BLOCK):
            end = min(begin + BLOCK, num_queries)
            # of the last key that is far left of all these queries, and of the first that is far right
            first = min(max(self.start + begin - self.left + 1, 0), self.num_keys)
            last = min(max(self.start + end - 1 + self.right, first), self.num_keys)
            i = torch.arange(begin, end, device=like.device) + self.start
            j = torch.arange(first, last, device=like.device)
            labels = (j - i[:, None]).clamp_(-self.left, self.right).add_(self.left)
            yield slice(begin, end), first, last, labels.expand(group, -1, -1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_label: Tensor, pairs: Clipped) -> Tensor:
        ctx.pairs = pairs
        return pairs.spread_now(by_label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Collect.apply(grad, ctx.pairs), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_pair: Tensor, pairs: Clipped) -> Tensor:
        ctx.pairs = pairs
        return pairs.collect_now(by_pair)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Spread.apply(grad, ctx.pairs), None
