"""Where a chunk stands among the keys of its cache: its start, where keys end, what masks may count.

And where it stands nowhere, so that no distance is defined.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos.nn.cache import AttentionCache, StaticKeyValueCache


@dataclass(frozen=True)
class Span:
    """Positions in tokens: numbers, or tensors [] in a compiled graph that serves every position."""

    start: int | Tensor  # of the first query; [batch] where the caller gave one for each sequence
    end: int | Tensor | None  # of the keys; None if none of them is to be left out
    num_keys: tuple[int, ...]  # each length that a mask may have

    def limit(
        self, key: Tensor, value: Tensor, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Key and value, and what else tells `relative_attention` about positions, masks among them.

        Args:
            key, value: [batch, heads, key, dim], of which only those before `end` exist.
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


def span_of(cache: AttentionCache | None, chunk: int, query_start: int | Tensor | None = None) -> Span:
    """The span of `chunk` keys that are to be appended to `cache`, or of a memory of so many.

    Args:
        query_start: position of the first query among all keys, where it is not that of the first new key.
    """
    if cache is None or cache.is_memory:
        # in cross-attention the position of a query has no effect, unless causal
        memory = None if cache is None else cache.filled_memory()
        length = chunk if memory is None else memory[0].shape[2]
        return Span(0 if query_start is None else query_start, None, (length,))
    if isinstance(cache, StaticKeyValueCache) and torch.compiler.is_compiling():
        first = cache.position
        return Span(first if query_start is None else query_start, first + chunk, (cache.capacity,))
    held = cache.length
    end = held + chunk
    num_keys = (end, cache.capacity) if isinstance(cache, StaticKeyValueCache) else (end,)
    return Span(held if query_start is None else query_start, end, num_keys)


def check_memory(name: str, length: int, cache_name: str, cache: AttentionCache | None) -> None:
    """Refuse a memory of another length than the one that a filled cache was made of."""
    held = None if cache is None else cache.filled_memory()
    if held is not None and held[0].shape[2] != length:
        raise ValueError(
            f"{name} must have the length of what {cache_name} holds = {held[0].shape[2]}; got {length}. "
            "Begin with an empty cache for another memory."
        )


def check_filled(key: Tensor, num_keys: int, cache: AttentionCache) -> None:
    """Refuse what a cache gave back as its memory where that has room for more than the memory."""
    if cache.is_memory and key.shape[2] != num_keys:
        raise ValueError(
            f"a cache of the memory must hold the keys of the memory alone = {num_keys}; got a "
            f"{type(cache).__name__} that gives {key.shape[2]}, as one of static capacity does. "
            "Make it with that capacity, or give KeyValueCache(is_memory=True)."
        )


def check_use(
    is_relative: bool,
    num_queries: int,
    num_keys: int,
    query_start: int | Tensor | None,
    is_causal: bool,
    cache: AttentionCache | None,
) -> None:
    """Refuse relative positions and causality where nobody says how queries and keys stand to each other.

    Args:
        num_queries, num_keys: lengths of query and key as the caller gave them, in tokens.
    """
    # by lengths, and not by identity: hooks, checkpoints and sharding hand on copies
    if is_relative and query_start is None and num_queries != num_keys:
        raise ValueError(
            "query_start must be given unless query and key have one length, as in self-attention; "
            f"got lengths {num_queries} and {num_keys}. Give the position of the first query among the keys, "
            "or use max_distance=None for cross-attention."
        )
    if cache is None or not cache.is_memory:
        return
    if is_relative:
        raise ValueError(
            "relative positions belong to self-attention, and a cache with is_memory=True to "
            "cross-attention. Give KeyValueCache(), or use max_distance=None."
        )
    if is_causal and query_start is None:
        raise ValueError(
            "is_causal cannot be used with a cache of a memory, which does not know where the query "
            "stands. Give query_start, or attn_mask."
        )
