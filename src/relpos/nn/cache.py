"""Keys and values kept between decoding steps, one object for one attention module.

What attention asks of a cache, and a growing one; a cache of static capacity is not here yet.
"""

from typing import Protocol

import torch
from torch import Tensor


class AttentionCache(Protocol):
    """What an attention module asks of its cache; `KeyValueCache` is one, and any other object may be."""

    @property
    def is_memory(self) -> bool:
        """Whether it holds the memory of cross-attention, projected once, and not a sequence that grows."""

    @property
    def length(self) -> int:
        """Tokens held, which is where the next chunk begins."""

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the memory, [batch, heads, key, dim] each, once they are known."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a chunk [batch, heads, chunk, dim]; returns all keys and values held."""


class KeyValueCache:
    """The projected keys and values that one attention module has seen so far.

    In self-attention each call appends its chunk, of any length, and the chunk's first query stands
    at position `length`. With `is_memory=True` (cross-attention) the first call fills the cache and
    later calls reuse it without projecting the memory again.
    """

    def __init__(self, *, is_memory: bool = False) -> None:
        self.is_memory = is_memory
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.key is None else self.key.shape[2]

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the memory, [batch, heads, key, dim] each, once they are known."""
        if not self.is_memory or self.key is None or self.value is None:
            return None
        return self.key, self.value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a chunk [batch, heads, chunk, dim]; returns all keys and values held."""
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            self.key = torch.cat((self.key, key), dim=2)
            self.value = torch.cat((self.value, value), dim=2)
        return self.key, self.value

    def reorder(self, rows: Tensor) -> None:
        """Keep rows `rows` [batch] of the batch, in that order, as beam search asks."""
        if self.key is not None and self.value is not None:
            self.key = self.key.index_select(0, rows)
            self.value = self.value.index_select(0, rows)
