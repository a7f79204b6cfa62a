"""Fused relative attention on the CPU: the kernel in csrc/, as operators of torch.

Nothing of [query, key] is kept: logits live for one block of queries and one span of keys.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos._inputs import Inputs

LIBRARY = Path(__file__).parent.parent / "_cpu_kernel.so"


def _load() -> str | None:
    """Why the kernel cannot be used, or None."""
    if not LIBRARY.exists():
        return "was not built: install relpos with a C++ compiler and --no-build-isolation"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"was built for another torch or machine: {str(error).splitlines()[0]}"
    return None


UNAVAILABLE = _load()


def instruction_set() -> str | None:
    """What the kernel was compiled for and this processor has: avx512, avx2 or baseline; None without one."""
    return None if UNAVAILABLE else torch.ops.relpos.cpu_instruction_set()


def why_not(inputs: Inputs) -> list[str]:
    """Every reason against it."""
    reasons = []
    if UNAVAILABLE is not None:
        reasons.append(UNAVAILABLE)
    if inputs.query.device.type != "cpu":
        reasons.append(f"runs on the CPU alone, and query is on {inputs.query.device}")
    if inputs.attn_mask is not None and inputs.attn_mask.requires_grad and torch.is_grad_enabled():
        reasons.append("has no gradient for attn_mask")
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        reasons.append("is an operator of relpos, which no exported program should need")
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        reasons.append("has no rules for torch.func and forward-mode derivatives")
    return reasons


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse is None where it was not asked for."""
    dtype = inputs.compute_dtype
    query, key, value = inputs.query, inputs.key, inputs.value
    if dtype == torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rel_k, rel_v = (None if x is None else x.to(dtype) for x in (inputs.rel_k, inputs.rel_v))
    has_tables = rel_k is not None or rel_v is not None
    start, lengths = inputs.query_start, inputs.key_lengths
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64) if inputs.dropout_p > 0 else None
    out, lse = torch.ops.relpos.cpu(
        query,
        key,
        value,
        rel_k,
        rel_v,
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
    return out.to(inputs.query.dtype), lse if inputs.return_lse else None


# how many arguments the operator has, and how many of them are tensors with gradients
_ARGUMENTS, _DIFFERENTIABLE = 16, 5


def _empty_as(like: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    """[batch, heads, rows, columns] laid out as the kernel does: heads beside one another if those of `like` are."""
    if like.stride(1) < like.stride(2):
        return like.new_empty(like.shape[0], rows, heads, columns).transpose(1, 2)
    return like.new_empty(like.shape[0], heads, rows, columns)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, _, value = arguments[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _empty_as(query, *query.shape[1:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, rel_k, rel_v = arguments[:_DIFFERENTIABLE]
    tables = [query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (rel_k, rel_v)]
    return *(_empty_as(x, *x.shape[1:]) for x in (query, key, value)), *tables


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(x for x in inputs if isinstance(x, Tensor)))


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    # read once: what unpacks them may do so only once, as checkpoints do
    out, lse, *tensors = ctx.saved_tensors
    left = iter(tensors)
    arguments = [
        next(left) if is_tensor else x for is_tensor, x in zip(ctx.is_tensor, ctx.others, strict=True)
    ]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.ops.relpos.cpu_backward(*arguments, out, lse, grad_out, grad_lse)
    of_tensors = [None if x is None else grad for x, grad in zip(arguments, grads, strict=False)]
    return *of_tensors, *[None] * (_ARGUMENTS - _DIFFERENTIABLE)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise NotImplementedError('backend "cpu" has no second derivative. Use backend="dense".')


if UNAVAILABLE is None:
    torch.library.register_fake("relpos::cpu", _fake)
    torch.library.register_fake("relpos::cpu_backward", _fake_backward)
    torch.library.register_autograd("relpos::cpu", _backward, setup_context=_keep)
    torch.library.register_autograd("relpos::cpu_backward", _no_second_derivative)
