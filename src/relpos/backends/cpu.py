"""Fused relative attention on the CPU: the kernel in csrc/, as operators of torch.

Nothing of [query, key] is kept: logits live for one block of queries and one span of keys.
"""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from relpos._inputs import Inputs
from relpos.backends._backend import reasons_against_operators

# RELPOS_CPU_KERNEL names a file to take in its place, such as one built to find faults of memory
LIBRARY = Path(os.environ.get("RELPOS_CPU_KERNEL") or Path(__file__).parent.parent / "_cpu_kernel.so")


# of the operators' signatures: goes up in operators.cpp too when one changes
VERSION = 1


def _load() -> str | None:
    """Why the kernel cannot be used, or None."""
    if not LIBRARY.is_file():
        if os.environ.get("RELPOS_CPU_KERNEL"):
            return f"is missing: RELPOS_CPU_KERNEL names {LIBRARY}, which is no file"
        return "was not built: `relpos doctor` says what to do"
    if _ends_early(LIBRARY):
        return "does not load: its file ends early. Install relpos again"
    try:
        torch.ops.load_library(LIBRARY)
        version = torch.ops.relpos.cpu_version()
    except OSError as error:
        # torch says which file, and its cause why
        cause = next(iter(str(error.__cause__ or error).splitlines()), "")
        return f"does not load, being damaged or built for another torch or machine: {cause}"
    except AttributeError:
        return "does not load: its file is no kernel of relpos, or an older one. Install relpos again"
    if version != VERSION:
        return f"was built from other sources, version {version} and not {VERSION}: install relpos again"
    return None


def _ends_early(library: Path) -> bool:
    """Whether a file of Linux lacks its end: the loader would map it and the process die of that."""
    with library.open("rb") as file:
        header = file.read(64)
    is_64_bits = header[:5] == b"\x7fELF\x02"
    if not is_64_bits or len(header) < 64:
        return header[:4] == b"\x7fELF" and len(header) < 64
    order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
    # where the table of sections begins, the size of its entries, and their number: it comes last
    begin, size, count = (int.from_bytes(header[i:j], order) for i, j in ((40, 48), (58, 60), (60, 62)))
    return begin + size * count > library.stat().st_size


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
    # a reentrant checkpoint runs without gradients first, and must drop then what it drops with them
    may_differentiate = torch.is_grad_enabled() or inputs.dropout_p > 0
    if inputs.attn_mask is not None and inputs.attn_mask.requires_grad and may_differentiate:
        reasons.append("has no gradient for attn_mask")
    return reasons + reasons_against_operators()


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse is None where it was not asked for."""
    dtype = inputs.compute_dtype
    query, key, value = inputs.query, inputs.key, inputs.value
    if dtype == torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rel_k, rel_v = (None if x is None else x.to(dtype) for x in (inputs.rel_k, inputs.rel_v))
    has_tables = rel_k is not None or rel_v is not None
    start, lengths = inputs.query_start, inputs.key_lengths
    seed = None
    if inputs.dropout_p > 0:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    out, lse = _attend(
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


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    may_differentiate = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if may_differentiate and any(x is not None and x.requires_grad for x in arguments[:_DIFFERENTIABLE]):
        return _Attention.apply(*arguments)
    return torch.ops.relpos.cpu.default(*arguments)


def _empty_as(like: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    """[batch, heads, rows, columns] as the kernel lays it out: heads side by side if those of `like` are."""
    if like.stride(1) < like.stride(2):
        return like.new_empty(like.shape[0], rows, heads, columns).transpose(1, 2)
    return like.new_empty(like.shape[0], heads, rows, columns)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, _, value = arguments[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    _, heads, num_queries, _ = query.shape
    out = _empty_as(query, heads, num_queries, value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=dtype)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, needs = *arguments[:_DIFFERENTIABLE], arguments[-1]
    query = tensors[0]
    grads = []
    for i, x in enumerate(tensors):
        if x is None or not needs >> i & 1:
            grads.append(query.new_empty(0))
        else:
            grads.append(_empty_as(x, *x.shape[1:]) if i < 3 else x.new_empty(x.shape))
    return tuple(grads)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    # read once: what unpacks them may do so only once, as checkpoints do
    out, lse, *tensors = ctx.saved_tensors
    arguments = [x if tensor is None else tensor for tensor, x in zip(tensors, ctx.others, strict=True)]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    is_needed = ctx.needs_input_grad[:_DIFFERENTIABLE]
    needs = sum(1 << i for i, needed in enumerate(is_needed) if needed)
    grads = torch.ops.relpos.cpu_backward.default(*arguments, out, lse, grad_out, grad_lse, needs)
    of_tensors = [grad if needed else None for needed, grad in zip(is_needed, grads, strict=True)]
    return *of_tensors, *[None] * (_ARGUMENTS - _DIFFERENTIABLE)


class _Attention(torch.autograd.Function):
    """The operator with the autograd that is registered for it, which takes twice as long to reach."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = torch.ops.relpos.cpu.default(*arguments)
        _keep(ctx, arguments, output)
        return output

    backward = staticmethod(_backward)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise NotImplementedError('backend "cpu" has no second derivative. Use backend="dense".')


if UNAVAILABLE is None:
    torch.library.register_fake("relpos::cpu", _fake)
    torch.library.register_fake("relpos::cpu_backward", _fake_backward)
    torch.library.register_autograd("relpos::cpu", _backward, setup_context=_keep)
    torch.library.register_autograd("relpos::cpu_backward", _no_second_derivative)
