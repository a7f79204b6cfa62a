"""Autograd for the operators of the fused backends, and memory for their results.

`relpos::NAME` takes `Arguments`, and maybe more, and returns results, out and lse first.
`relpos::NAME_backward` takes these arguments and results, grad_out, grad_lse, and as the bits of a number
which gradients it must find.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relpos.backends.arguments import NUM_DIFFERENTIABLE
from relpos.backends.backend import no_second_derivative


def differentiable(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The operator `relpos::name` with its autograd, which is registered for compiled graphs too."""
    operator = getattr(torch.ops.relpos, name).default
    backward_operator = getattr(torch.ops.relpos, f"{name}_backward").default
    num_arguments, num_results = (len(x) for x in (operator._schema.arguments, operator._schema.returns))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))

    def pull_back(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Any, ...]:
        # read once: what unpacks them may do so only once, as checkpoints do
        saved = ctx.saved_tensors
        results, tensors = saved[:num_results], saved[num_results:]
        given = [x if tensor is None else tensor for tensor, x in zip(tensors, ctx.others, strict=True)]
        if grad_out is None:
            grad_out = torch.zeros_like(results[0])
        is_needed = ctx.needs_input_grad[:NUM_DIFFERENTIABLE]
        needs = sum(1 << i for i, needed in enumerate(is_needed) if needed)
        grads = backward_operator(*given, *results, grad_out, grad_lse, needs)
        of_tensors = [grad if needed else None for needed, grad in zip(is_needed, grads, strict=True)]
        return *of_tensors, *[None] * (num_arguments - NUM_DIFFERENTIABLE)

    def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise no_second_derivative(name)

    class Attention(torch.autograd.Function):
        """The same as what is registered, which takes twice as long to reach."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            output = operator(*given)
            keep(ctx, given, output)
            return output

        backward = staticmethod(pull_back)

    def attend(*given: Any) -> tuple[Tensor, ...]:
        may_differentiate = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if may_differentiate and any(x is not None and x.requires_grad for x in given[:NUM_DIFFERENTIABLE]):
            return Attention.apply(*given)
        return operator(*given)

    torch.library.register_autograd(f"relpos::{name}", pull_back, setup_context=keep)
    torch.library.register_autograd(f"relpos::{name}_backward", refuse)
    return attend


def empty_gradients(*given: Any) -> tuple[Tensor, ...]:
    """Memory for what the backward operator returns to its arguments; of no size where the bit is not set."""
    *tensors, needs = *given[:NUM_DIFFERENTIABLE], given[-1]
    query = tensors[0]
    grads = []
    for i, x in enumerate(tensors):
        if x is None or not needs >> i & 1:
            grads.append(query.new_empty(0))
        else:
            grads.append(empty_as(x, *x.shape[1:]) if i < 3 else x.new_empty(x.shape))
    return tuple(grads)


def empty_as(like: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    """[batch, heads, rows, columns] with heads side by side in memory if those of `like` are."""
    if like.stride(1) < like.stride(2):
        return like.new_empty(like.shape[0], rows, heads, columns).transpose(1, 2)
    return like.new_empty(like.shape[0], heads, rows, columns)
