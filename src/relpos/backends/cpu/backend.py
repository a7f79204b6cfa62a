"""Fused relative attention on the CPU: the kernel in csrc/, as operators of torch.

Nothing of [query, key] is kept: logits live for one block of queries and one span of keys.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos._inputs import Inputs
from relpos.backends.arguments import arguments
from relpos.backends.backend import reasons_against_operators
from relpos.backends.operator import differentiable, empty_as, empty_gradients

# RELPOS_CPU_KERNEL names a file to take in its place, such as one built to find faults of memory
LIBRARY = Path(os.environ.get("RELPOS_CPU_KERNEL") or Path(__file__).parents[2] / "_cpu_kernel.so")


# of the operators' signatures: goes up in operators.cpp too when one changes
VERSION = 1


def _load() -> str | None:
    """Why the kernel cannot be used, or None."""
    if not LIBRARY.is_file():
        if os.environ.get("RELPOS_CPU_KERNEL"):
            return f"is missing: RELPOS_CPU_KERNEL names {LIBRARY}, which is no file"
        return "was not built: `relpos doctor` says what to do"
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
    out, lse = _attend(*arguments(inputs))
    return out.to(inputs.query.dtype), lse if inputs.return_lse else None


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    query, _, value = given[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    _, heads, num_queries, _ = query.shape
    out = empty_as(query, heads, num_queries, value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=dtype)


if UNAVAILABLE is None:
    torch.library.register_fake("relpos::cpu", _fake)
    torch.library.register_fake("relpos::cpu_backward", empty_gradients)
    _attend = differentiable("cpu")
