"""The arguments of the operators `relpos::cpu`, `relpos::triton` and `relpos::merged`: one record for all.

torch's schemas are made from it, and a test holds the schema of the C++ operator against it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from relpos._inputs import Inputs

Function = TypeVar("Function", bound=Callable[..., Any])

# the first arguments, which are those with a gradient: query, key, value, rel_k, rel_v
NUM_DIFFERENTIABLE = 5


class Arguments(NamedTuple):
    """The arguments of `relpos.relative_attention` as operators take them, in their order.

    An operator may take more after these. `starts`, int64 [batch], is query_start where that is a tensor, and
    `start` where it is a number; `seed`, int64 [1], is there for dropout alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None
    relations: Tensor | None
    mask: Tensor | None
    starts: Tensor | None
    start: int
    key_lengths: Tensor | None
    left: int
    right: int
    is_causal: bool
    seed: Tensor | None
    dropout_p: float
    scale: float

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that have gradients."""
        return self.query, self.key, self.value, self.rel_k, self.rel_v

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def has_tables(self) -> bool:
        """Whether labels matter."""
        return self.rel_k is not None or self.rel_v is not None

    @property
    def num_labels(self) -> int:
        """Rows of the tables."""
        return self.left + self.right + 1

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]


NUM_ARGUMENTS = len(Arguments._fields)


def arguments(inputs: Inputs) -> Arguments:
    """The arguments of an operator for checked inputs."""
    dtype = inputs.compute_dtype
    query, key, value = inputs.query, inputs.key, inputs.value
    if dtype == torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rel_k, rel_v = inputs.rel_k, inputs.rel_v
    has_tables = rel_k is not None or rel_v is not None
    start, lengths = inputs.query_start, inputs.key_lengths
    seed = None
    if inputs.dropout_p > 0:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    return Arguments(
        query,
        key,
        value,
        None if rel_k is None else rel_k.to(dtype),
        None if rel_v is None else rel_v.to(dtype),
        inputs.relations if has_tables else None,
        inputs.attn_mask,
        start.long() if isinstance(start, Tensor) else None,
        0 if isinstance(start, Tensor) else start,
        None if lengths is None else lengths.long(),
        inputs.left if has_tables else 0,
        inputs.right if has_tables else 0,
        inputs.is_causal,
        seed,
        inputs.dropout_p,
        inputs.scale,
    )


def takes_arguments(*more: Mapping[str, Any], num_results: int) -> Callable[[Function], Function]:
    """Give `function(*given)` the signature of an operator for torch: `Arguments`, then `more`."""
    types = dict(Arguments.__annotations__)
    for names in more:
        types |= names
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=x) for name, x in types.items()],
        return_annotation=tuple[(Tensor,) * num_results],  # type: ignore[misc]
    )

    def annotated(function: Function) -> Function:
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return annotated


def needs_gradient(inputs: Inputs) -> bool:
    """Whether a backward pass may come."""
    tensors = (inputs.query, inputs.key, inputs.value, inputs.rel_k, inputs.rel_v)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
