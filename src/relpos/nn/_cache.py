"""Keys and values kept between decoding steps, one object for one attention module.

What attention asks of a cache; a cache that grows; and one of static capacity, whose tensors keep their
shapes and addresses, so that a compiled step serves every position.
"""

from typing import Protocol

import torch
from torch import Tensor

from relpos._inputs import FLOAT_DTYPES, INT_DTYPES, can_look_at
from relpos.nn._arguments import check_count


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
        """Add a chunk [batch, heads, chunk, dim]; returns all keys and values held.

        More may follow them, whatever it holds: attention stops at `length`, this chunk included.
        """


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
        """Add a chunk [batch, heads, chunk, dim]; returns all keys and values held.

        Raises:
            ValueError: the chunk has another batch, other heads or another width than what is held.
        """
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            _check_chunk(key, self.key)
            self.key = torch.cat((self.key, key), dim=2)
            self.value = torch.cat((self.value, value), dim=2)
        return self.key, self.value

    def reorder(self, rows: Tensor) -> None:
        """Keep rows `rows` [batch] of the batch, in that order, as beam search asks; their number may change.

        Raises:
            TypeError, ValueError: rows are no row numbers of what is held.
        """
        if self.key is not None and self.value is not None:
            _check_rows(rows, self.key)
            self.key = self.key.index_select(0, rows)
            self.value = self.value.index_select(0, rows)


class StaticKeyValueCache:
    """A cache of self-attention with room for `capacity` tokens, which is all it ever takes.

    Args:
        batch, num_heads, capacity, head_dim: sizes of keys and of values; capacity in tokens.

    `make_cache` and `make_caches` of the modules know all but batch and capacity. The number of tokens held
    is a tensor, so that a step under `torch.compile` is compiled once for all positions, and once more where
    a cache of the memory is still empty, as at the first step of a decoder. Under it attention reads the
    whole capacity, and masks must have that many keys; otherwise it reads what is held, and asks the device
    for that number. Room that was never filled counts for nothing, whatever it holds. It is for decoding:
    nothing that needs a gradient is taken.

    Raises:
        ValueError, TypeError: sizes that are no whole numbers of at least 1; a dtype that is not float.
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
        """Tokens that it has room for."""
        return self.key.shape[2]

    @property
    def length(self) -> int:
        """Tokens held; waits for the device."""
        return int(self._length)

    @property
    def position(self) -> Tensor:
        """Tokens held, int64 []; waits for nothing. A copy, which stays what it is."""
        return self._length.clone()

    def filled_memory(self) -> None:
        """Nothing: it holds no memory."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a chunk [batch, heads, chunk, dim] behind what is held.

        Returns:
            All keys and values held, as views. Under `torch.compile` [batch, heads, capacity, dim], of which
            the first `length` are there.
        Raises:
            ValueError: it does not fit in (RuntimeError where compiled), has other sizes or needs a gradient.
            TypeError: it does not fit the dtype.
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
        # within bounds even without room, else a compiled kernel fails before _room_for can say why
        at = (self._length + torch.arange(chunk, device=key.device)).clamp(max=self.capacity - 1)
        self.key.index_copy_(2, at, key.to(self.key.dtype))
        self.value.index_copy_(2, at, value.to(self.value.dtype))
        self._length.add_(chunk)
        return self.key[:, :, :held], self.value[:, :, :held]

    def reorder(self, rows: Tensor) -> None:
        """Put rows `rows` [batch] of the batch in the places of all, in that order, as beam search asks.

        Raises:
            TypeError, ValueError: rows are no row numbers of what is held, or not one for each.
        """
        _check_rows(rows, self.key)
        if rows.shape[0] != self.key.shape[0]:
            raise ValueError(
                f"rows must be as many as the batch of the cache = {self.key.shape[0]}; got {rows.shape[0]}. "
                "Its size is static."
            )
        for held in (self.key, self.value):
            held.copy_(held.index_select(0, rows))

    def reset(self) -> None:
        """Hold nothing any more, in the same memory, for the next sequences."""
        self._length.zero_()

    def _room_for(self, chunk: int) -> int:
        """The keys to read once `chunk` more tokens are held, where there is room for them."""
        if torch.compiler.is_compiling():
            has_room = self._length + chunk <= self.capacity
            torch._assert_async(has_room, f"the cache is full: its capacity is {self.capacity} tokens")
            return self.capacity
        held = self.length + chunk
        if held > self.capacity:
            raise ValueError(
                f"capacity of the cache must be at least the tokens held and those to add = {held}; "
                f"got {self.capacity}. Make a larger cache, or reset() it for new sequences."
            )
        return held


def _check_chunk(key: Tensor, held: Tensor) -> None:
    wanted, found = ([x.shape[0], x.shape[1], x.shape[3]] for x in (held, key))
    if found != wanted:
        raise ValueError(
            f"key and value must have the batch, heads and width of what the cache holds = {wanted}; "
            f"got {found}. Each attention module has a cache of its own, made for one batch."
        )
    if key.device != held.device:
        raise ValueError(
            f"key and value must be on the device of the cache = {held.device}; got {key.device}. "
            "Make the cache on that device."
        )


def _check_without_gradient(key: Tensor, value: Tensor) -> None:
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError(
            "key and value must need no gradient, which a cache of static capacity would overwrite; got some "
            "that do. Decode under torch.no_grad(), or use KeyValueCache()."
        )


def _check_rows(rows: Tensor, held: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.dtype not in INT_DTYPES[:2]:
        found = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows must be a tensor of int64 or int32; got {found}. Convert it with .long().")
    if rows.dim() != 1:
        raise ValueError(f"rows must be [batch]; got {list(rows.shape)}. Give one row number for each place.")
    if rows.device != held.device:
        raise ValueError(
            f"rows must be on the device of the cache = {held.device}; got {rows.device}. Move it with .to()."
        )
    if can_look_at(rows) and rows.numel() and (rows.min() < 0 or rows.max() >= held.shape[0]):
        raise ValueError(
            f"rows must be between 0 and the batch held - 1 = {held.shape[0] - 1}; "
            f"got {int(rows.min())} to {int(rows.max())}. They number the sequences held."
        )
