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

    start: int | Tensor  # of the first query
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


def span_of(cache: AttentionCache | None, chunk: int) -> Span:
    """The span of `chunk` tokens that are to be appended to `cache`, or of a memory of so many."""
    if cache is None:
        return Span(0, None, (chunk,))
    if cache.is_memory:
        # in cross-attention the position of a query has no effect, unless causal, which is refused
        memory = cache.filled_memory()
        return Span(0, None, (chunk if memory is None else memory[0].shape[2],))
    if isinstance(cache, StaticKeyValueCache) and torch.compiler.is_compiling():
        start = cache.position
        return Span(start, start + chunk, (cache.capacity,))
    first = cache.length
    end = first + chunk
    if isinstance(cache, StaticKeyValueCache):
        return Span(first, end, (end, cache.capacity))
    return Span(first, end, (end,))


def check_memory(name: str, length: int, cache_name: str, cache: AttentionCache | None) -> None:
    """Refuse a memory of another length than the one that a filled cache was made of."""
    held = None if cache is None else cache.filled_memory()
    if held is not None and held[0].shape[2] != length:
        raise ValueError(
            f"{name} must have the length of what {cache_name} holds = {held[0].shape[2]}; got {length}. "
            "Begin with an empty cache for another memory."
        )


def check_use(
    is_relative: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    cache: AttentionCache | None,
) -> None:
    """Refuse relative positions and causality where tokens have no common positions."""
    # by identity: sequences of one length are no less two sequences
    if is_relative and not (query is key and key is value):
        found = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(
            "relative positions belong to self-attention: query, key and value must be one tensor, as in "
            f"attention(x, x, x); got different ones, {found}. "
            "Use max_distance=None for cross-attention."
        )
    if cache is None or not cache.is_memory:
        return
    if is_relative:
        raise ValueError(
            "relative positions belong to self-attention, and a cache with is_memory=True to "
            "cross-attention. Give KeyValueCache(), or use max_distance=None."
        )
    if is_causal:
        raise ValueError(
            "is_causal cannot be used with a cache of a memory, which does not know where the query "
            "stands. Give attn_mask."
        )
