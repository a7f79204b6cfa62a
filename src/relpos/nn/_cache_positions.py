"""Positions of a chunk among the keys of its cache: start of the queries, end of the keys, mask lengths.

Refuses calls whose positions are undefined.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos.nn._cache import AttentionCache, StaticKeyValueCache


@dataclass(frozen=True)
class ChunkPositions:
    """Positions in tokens: integers, or tensors [] under `torch.compile`, where one graph serves them all.

    Attributes:
        start: position of the first query; [batch] if the caller gave one for each sequence.
        end: number of keys that exist; None for all of them.
        num_keys: the key lengths that a mask may have.
    """

    start: int | Tensor
    end: int | Tensor | None
    num_keys: tuple[int, ...]

    def trim(
        self, key: Tensor, value: Tensor, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Drop keys and mask columns from `end` on.

        Args:
            key, value: [batch, heads, key, dim]. Keys from `end` on do not exist.
        Returns:
            Key, value, and the arguments of `relative_attention` for positions and mask.
        """
        if isinstance(self.end, Tensor):
            batch = key.shape[0]
            start = torch.as_tensor(self.start, device=key.device)
            lengths = {"query_start": start.expand(batch), "key_lengths": self.end.expand(batch)}
            return key, value, {"attn_mask": attn_mask, **lengths}
        if self.end is not None and key.shape[2] != self.end:
            key, value = key[:, :, : self.end], value[:, :, : self.end]
        if attn_mask is not None and self.end is not None and attn_mask.shape[-1] != self.end:
            attn_mask = attn_mask[..., : self.end]
        return key, value, {"attn_mask": attn_mask, "query_start": self.start}


def chunk_positions(
    cache: AttentionCache | None, chunk: int, query_start: int | Tensor | None = None
) -> ChunkPositions:
    """The positions of `chunk` keys that are to be appended to `cache`, or of a memory of so many.

    Args:
        query_start: position of the first query among all keys, where it is not that of the first new key.
    """
    if cache is None or cache.is_memory:
        # cross-attention has no relative positions: only is_causal reads the query's position
        memory = None if cache is None else cache.filled_memory()
        length = chunk if memory is None else memory[0].shape[2]
        return ChunkPositions(0 if query_start is None else query_start, None, (length,))
    if isinstance(cache, StaticKeyValueCache) and torch.compiler.is_compiling():
        first = cache.position
        return ChunkPositions(first if query_start is None else query_start, first + chunk, (cache.capacity,))
    held = cache.length
    end = held + chunk
    num_keys = (end, cache.capacity) if isinstance(cache, StaticKeyValueCache) else (end,)
    return ChunkPositions(held if query_start is None else query_start, end, num_keys)


def check_memory(name: str, length: int, cache_name: str, cache: AttentionCache | None) -> None:
    """Refuse a memory whose length differs from that of the memory in a filled cache."""
    held = None if cache is None else cache.filled_memory()
    if held is not None and held[0].shape[2] != length:
        raise ValueError(
            f"{name} must have the length held in {cache_name} = {held[0].shape[2]}; got {length}. "
            "Use an empty cache for each new memory."
        )


def check_filled(key: Tensor, num_keys: int, cache: AttentionCache) -> None:
    """Refuse a memory cache that returns more keys than the memory has."""
    if cache.is_memory and key.shape[2] != num_keys:
        raise ValueError(
            f"a memory cache must return as many keys as the memory has = {num_keys}; got "
            f"{key.shape[2]} from a {type(cache).__name__}, perhaps its whole static capacity. "
            "Make it with that capacity, or use KeyValueCache(is_memory=True)."
        )


def check_use(
    is_relative: bool,
    num_queries: int,
    num_keys: int,
    query_start: int | Tensor | None,
    is_causal: bool,
    cache: AttentionCache | None,
) -> None:
    """Refuse relative positions and is_causal where the query's position among the keys is unknown.

    Args:
        num_queries, num_keys: lengths of the caller's query and key, in tokens.
    """
    # compares lengths, not identity: hooks, checkpoints and sharding pass copies
    if is_relative and query_start is None and num_queries != num_keys:
        raise ValueError(
            "query_start must be given unless query and key have the same length, as in self-attention; "
            f"got lengths {num_queries} and {num_keys}. Give the position of the first query among the keys, "
            "or use max_distance=None for cross-attention."
        )
    if cache is None or not cache.is_memory:
        return
    if is_relative:
        raise ValueError(
            "a cache with is_memory=True is for cross-attention, which has no relative positions. "
            "Use KeyValueCache(), or a module with max_distance=None."
        )
    if is_causal and query_start is None:
        raise ValueError(
            "is_causal cannot be used with a memory cache, which does not know the query's position. "
            "Give query_start, or attn_mask."
        )
