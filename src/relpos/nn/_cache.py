"""Caches of keys and values for decoding, one for each attention module.

The protocol that attention needs; a cache that grows; and a static cache, whose tensors keep their shapes and
addresses, so that one compiled step serves all positions.
"""

from typing import Protocol

import torch
from torch import Tensor

from relpos._inputs import FLOAT_DTYPES, INT_DTYPES, can_look_at
from relpos.nn._arguments import check_count


class AttentionCache(Protocol):
    """The protocol of a cache. Attention takes `KeyValueCache`, or any other object that follows it."""

    @property
    def is_memory(self) -> bool:
        """True for the memory of cross-attention, projected once; False for a sequence that grows."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache: the position of the next chunk."""

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the memory, [batch, heads, key, dim] each; None before the first call."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a chunk [batch, heads, chunk, dim], and return all keys and values.

        They may be longer than `length`: attention ignores keys from `length` on.
        """


class KeyValueCache:
    """The keys and values of all tokens that one attention module has seen.

    In self-attention each call appends a chunk of any length, whose first query has position `length`.
    With `is_memory=True`, for cross-attention, the first call fills the cache and later calls reuse it
    without projecting the memory again.
    """

    def __init__(self, *, is_memory: bool = False) -> None:
        self.is_memory = is_memory
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self.key is None else self.key.shape[2]

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the memory, [batch, heads, key, dim] each; None before the first call."""
        if not self.is_memory or self.key is None or self.value is None:
            return None
        return self.key, self.value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a chunk [batch, heads, chunk, dim], and return all keys and values.

        Raises:
            ValueError: batch, heads or width differ from those in the cache.
        """
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            _check_chunk(key, self.key)
            self.key = torch.cat((self.key, key), dim=2)
            self.value = torch.cat((self.value, value), dim=2)
        return self.key, self.value

    def reorder(self, rows: Tensor) -> None:
        """Select `rows` [batch] of the batch, in that order, for beam search; the batch size may change.

        Raises:
            TypeError, ValueError: rows are no row numbers of the batch in the cache.
        """
        if self.key is not None and self.value is not None:
            _check_rows(rows, self.key)
            self.key = self.key.index_select(0, rows)
            self.value = self.value.index_select(0, rows)


class StaticKeyValueCache:
    """A cache for self-attention with a fixed capacity, allocated once.

    Args:
        batch, num_heads, capacity, head_dim: sizes of keys and values; capacity in tokens.

    `make_cache` and `make_caches` of the modules need only batch and capacity.

    The length is a tensor, so `torch.compile` compiles a step once for all positions, and once more for the
    first step of a decoder, whose memory cache is still empty. A compiled step reads the whole capacity, and
    its masks need `capacity` keys. Otherwise attention reads the filled part alone, and waits for the device
    to learn the length. Unfilled entries never count, whatever they hold, NaN included. The cache takes no
    keys or values that need a gradient.

    Raises:
        ValueError, TypeError: a size is no integer of at least 1, or the dtype is not float.
    """

    is_memory = False

    def __init__(
        self,
        batch: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"batch": batch, "num_heads": num_heads, "capacity": capacity, "head_dim": head_dim}
        for name, size in sizes.items():
            check_count(name, size)
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise TypeError(f"dtype must be a float dtype; got {dtype}. Give that of the module's weights.")
        shape = (batch, num_heads, capacity, head_dim)
        self.key = torch.zeros(shape, device=device, dtype=dtype)
        self.value = torch.zeros(shape, device=device, dtype=dtype)
        self._length = torch.zeros((), device=device, dtype=torch.int64)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the cache."""
        return self.key.shape[2]

    @property
    def length(self) -> int:
        """Number of tokens in the cache; waits for the device."""
        return int(self._length)

    @property
    def position(self) -> Tensor:
        """Number of tokens in the cache, int64 [], without waiting: a copy, which no later step changes."""
        return self._length.clone()

    def filled_memory(self) -> None:
        """None: this cache holds no memory."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a chunk [batch, heads, chunk, dim] after the tokens in the cache.

        Returns:
            All keys and values, as views; under `torch.compile` [batch, heads, capacity, dim], of which only
            the first `length` are filled.
        Raises:
            ValueError: the cache is full (RuntimeError if compiled), sizes differ, or a gradient is needed.
            TypeError: the dtype of the cache cannot hold the chunk.
        """
        _check_chunk(key, self.key)
        _check_without_gradient(key, value)
        if torch.promote_types(key.dtype, self.key.dtype) != self.key.dtype:
            raise TypeError(
                f"dtype of the cache must hold that of its keys = {key.dtype}; got {self.key.dtype}. "
                "Make the cache with that dtype."
            )
        chunk = key.shape[2]
        held = self._room_for(chunk)
        # clamped: a full cache must fail in _room_for, not in an index out of bounds of a compiled kernel
        at = (self._length + torch.arange(chunk, device=key.device)).clamp(max=self.capacity - 1)
        self.key.index_copy_(2, at, key.to(self.key.dtype))
        self.value.index_copy_(2, at, value.to(self.value.dtype))
        self._length.add_(chunk)
        return self.key[:, :, :held], self.value[:, :, :held]

    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by its rows `rows` [batch], in that order, for beam search.

        Raises:
            TypeError, ValueError: rows are no row numbers of the batch, or not as many as it has.
        """
        _check_rows(rows, self.key)
        if rows.shape[0] != self.key.shape[0]:
            raise ValueError(
                f"rows must be as many as the batch of the cache = {self.key.shape[0]}; got {rows.shape[0]}. "
                "The size of this cache is fixed."
            )
        for held in (self.key, self.value):
            held.copy_(held.index_select(0, rows))

    def reset(self) -> None:
        """Empty the cache for the next sequences; its memory stays."""
        self._length.zero_()

    def _room_for(self, chunk: int) -> int:
        """Number of keys to read after `chunk` more tokens; raises if they do not fit."""
        if torch.compiler.is_compiling():
            has_room = self._length + chunk <= self.capacity
            torch._assert_async(has_room, f"the cache is full: its capacity is {self.capacity} tokens")
            return self.capacity
        held = self.length + chunk
        if held > self.capacity:
            raise ValueError(
                f"capacity of the cache must be at least its tokens plus the new ones = {held}; "
                f"got {self.capacity}. Make a larger cache, or reset() it for new sequences."
            )
        return held


def _check_chunk(key: Tensor, held: Tensor) -> None:
    wanted, found = ([x.shape[0], x.shape[1], x.shape[3]] for x in (held, key))
    if found != wanted:
        raise ValueError(
            f"key and value must have the batch, heads and width of the cache = {wanted}; "
            f"got {found}. Make a cache for each attention module and each batch."
        )
    if key.device != held.device:
        raise ValueError(
            f"key and value must be on the device of the cache = {held.device}; got {key.device}. "
            "Make the cache on that device."
        )


def _check_without_gradient(key: Tensor, value: Tensor) -> None:
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError(
            "key and value must not require a gradient, since a static cache is overwritten in place; "
            "got some that do. Decode under torch.no_grad(), or use KeyValueCache()."
        )


def _check_rows(rows: Tensor, held: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.dtype not in INT_DTYPES[:2]:
        found = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows must be a tensor of int64 or int32; got {found}. Convert it with .long().")
    if rows.dim() != 1:
        raise ValueError(
            f"rows must be [batch]; got {list(rows.shape)}. Give one row number for each sequence."
        )
    if rows.device != held.device:
        raise ValueError(
            f"rows must be on the device of the cache = {held.device}; got {rows.device}. Move it with .to()."
        )
    if can_look_at(rows) and rows.numel() and (rows.min() < 0 or rows.max() >= held.shape[0]):
        raise ValueError(
            f"rows must be between 0 and the batch of the cache - 1 = {held.shape[0] - 1}; "
            f"got {int(rows.min())} to {int(rows.max())}. They are indices of sequences in the cache."
        )
