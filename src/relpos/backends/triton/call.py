"""The arguments of the operators as kernels take them: tensors, strides, numbers, and what is compiled in."""

import struct
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from relpos.backends.arguments import Arguments
from relpos.backends.triton import sizes
from relpos.backends.triton.block import IS_INTERPRETED


class Call(Arguments):
    """The arguments of one call, and what kernels are told of them."""

    @cached_property
    def absent(self) -> Tensor:
        """The tensor in whose place kernels are told that there is none."""
        return self.query.new_empty(0)

    @property
    def row_width(self) -> int:
        """Labels of one query in scratch memory, rounded up so that rows are aligned."""
        return -(-self.num_labels // 16) * 16

    @property
    def mask_kind(self) -> str:
        """As kernels are told."""
        if self.mask is None:
            return "none"
        return "float" if self.mask.dtype.is_floating_point else "bool"

    @property
    def kind(self) -> sizes.Kind:
        """What the sizes of blocks depend on."""
        width = max(self.query.shape[3], self.value.shape[3])
        return sizes.Kind(
            itemsize=self.query.dtype.itemsize,
            width=sizes.padded(width),
            is_general=self.relations is not None or self.mask is not None or self.seed is not None,
            is_grouped=self.num_groups > 1,
            has_one_table=(self.rel_k is None) != (self.rel_v is None),
            has_float_mask=self.mask_kind == "float",
        )

    def size(self, kernel: str) -> sizes.Size:
        """Of the blocks of a kernel that meets pairs."""
        if IS_INTERPRETED.value:
            return sizes.interpreted(max(self.query.shape[2], self.key.shape[2]))
        return sizes.candidates(kernel, self.kind)[0]

    def scratch(self, is_needed: bool) -> Tensor:
        """[batch, heads, query, row_width], not set; empty where it is not needed."""
        shape = (*self.query.shape[:3], self.row_width) if is_needed else 0
        return self.query.new_empty(shape, dtype=self.dtype)

    def for_kernels(self) -> "Call":
        """The same with tensors that kernels can take as they are."""
        query, key, value = (addressable(x) for x in self[:3])
        relations, mask = (None if x is None else addressable(x) for x in (self.relations, self.mask))
        starts, lengths = (None if x is None else x.contiguous() for x in (self.starts, self.key_lengths))
        if is_traced(query):
            # torch believes that a kernel writes to whatever the addresses of its results depend on
            relations, starts, lengths = (
                None if x is None else x.clone() for x in (relations, starts, lengths)
            )
        if mask is not None and mask.dtype == torch.bool:
            # beside products of float64 Triton 3.7 compiles no bytes, nor int32 where weights are dropped
            is_double = query.dtype == torch.float64
            mask = mask.to(torch.int64) if is_double and not IS_INTERPRETED.value else mask.view(torch.uint8)
        elif mask is not None and mask.dtype.itemsize > self.dtype.itemsize:
            mask = mask.to(self.dtype)
        return self._replace(
            query=query,
            key=key,
            value=value,
            relations=relations,
            mask=mask,
            starts=starts,
            key_lengths=lengths,
        )

    def pointer(self, x: Tensor | None) -> Tensor | None:
        """x, or where there is none an empty tensor in its place."""
        return self.absent if x is None else x

    def numbers(self) -> tuple[Any, ...]:
        """The numbers that kernels of pairs take after the strides."""
        batch, heads, num_queries, _ = self.query.shape
        num_keys, p = self.key.shape[2], self.dropout_p
        # what lies beyond makes no difference, and would overflow
        reach = num_queries + num_keys + self.num_labels
        start = torch.sym_max(torch.sym_min(self.start, reach), -reach)
        return (
            *(heads, num_queries, num_keys, start, self.left, self.right, self.row_width),
            batch * heads * num_queries,
            *split(self.scale),
            int(p * 2**32 + 0.5),
            *split(1 / (1 - p) if p < 1 else 0.0),
        )

    def compiled_in(self) -> dict[str, Any]:
        """What kernels of pairs are compiled for, whatever the sizes of blocks."""
        d_k, d_v = self.query.shape[3], self.value.shape[3]
        return {
            "GROUPS": self.num_groups,
            "D_K": d_k,
            "D_V": d_v,
            "HAS_REL_K": self.rel_k is not None,
            "HAS_REL_V": self.rel_v is not None,
            "HAS_RELATIONS": self.relations is not None,
            "HAS_STARTS": self.starts is not None,
            "HAS_LENGTHS": self.key_lengths is not None,
            "HAS_DROPOUT": self.seed is not None,
            "IS_CAUSAL": self.is_causal,
            "MASK": self.mask_kind,
            "PRECISION": precision(),
            "PADDED_K": sizes.padded(d_k),
            "PADDED_V": sizes.padded(d_v),
        }


def is_traced(x: Tensor) -> bool:
    """Whether torch only finds out what would be done with x."""
    return isinstance(x, (FakeTensor, FunctionalTensor))


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Where Triton is to launch: on the device of x, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda and not is_traced(x) else nullcontext()


def precision() -> str:
    """Of products of float32, as torch is told to take them on GPUs: exact, or by TF32."""
    return "ieee" if torch.backends.cuda.matmul.fp32_precision in ("none", "ieee") else "tf32"


def split(x: float) -> tuple[float, float]:
    """x as what float32 holds of it and the rest: numbers reach kernels as float32."""
    if not isinstance(x, float) or abs(x) > torch.finfo(torch.float32).max:
        return x, 0.0
    high: float = struct.unpack("f", struct.pack("f", x))[0]
    return high, x - high


def addressable(x: Tensor) -> Tensor:
    """x, or a copy where products of a stride with an index within a block would overflow int32.

    What is larger still comes to kernels as int64.
    """
    return x.contiguous() if any(2**23 <= stride < 2**31 for stride in x.stride()[2:]) else x


def pair_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of what is broadcast to [batch, heads, query, key]: 0 along a dimension of one."""
    if x is None:
        return 0, 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def table_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a table, that of its heads first."""
    if x is None:
        return 0, 0, 0
    return x.stride() if x.dim() == 3 else (0, *x.stride())


def blocks_of(length: int, size: int) -> int:
    """How many blocks cover a length."""
    return (length + size - 1) // size
