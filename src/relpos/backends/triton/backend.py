"""Fused relative attention on NVIDIA GPUs: kernels in Triton, as operators of torch that it can compile.

Nothing of [query, key] is kept. Triton's interpreter runs the same kernels on the CPU, for tests of them.
"""

import os
import shutil
import sysconfig
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from relpos._inputs import Inputs
from relpos.backends.arguments import arguments, needs_gradient
from relpos.backends.backend import reasons_against_operators

# widths of heads; float64 needs more memory than a program has
WIDEST, WIDEST_DOUBLE = 256, 128
# bfloat16 and asynchronous copies
OLDEST_CAPABILITY = 8
# how the reason begins where Triton is there and cannot build what launches kernels
NO_LAUNCH = "needs Triton, which needs "
# as Triton reads it
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _load() -> str | None:
    """Why no kernel can be compiled here, or None."""
    if torch.version.cuda is None and not IS_INTERPRETED:
        # and Triton, whose import takes long, is left alone
        return "needs a build of torch for CUDA"
    try:
        import_module("triton")
    except Exception as error:
        # whatever goes wrong there, the other backends serve
        cause = " ".join(str(error).split()).replace("; ", ", ")
        return f"needs Triton, which does not import: {cause}"
    missing = [] if IS_INTERPRETED else missing_to_launch()
    return NO_LAUNCH + missing[0] if missing else None


def missing_to_launch() -> list[str]:
    """What the module in C, by which Triton launches kernels, cannot be built without on this machine."""
    own = os.environ.get("CC")
    names = [own] if own is not None else ["gcc", "clang"]
    missing = []
    if not any(shutil.which(name) for name in names):
        missing.append(f"a C compiler to launch kernels, and finds no {' or '.join(names)}")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(f"the headers of Python to launch kernels, and {header} is missing")
    return missing


UNAVAILABLE = _load()
if UNAVAILABLE is None:
    from relpos.backends.triton import operators


def why_not(inputs: Inputs) -> list[str]:
    """Every reason against it."""
    reasons = []
    if UNAVAILABLE is not None:
        reasons.append(UNAVAILABLE)
    query = inputs.query
    if query.device.type != ("cpu" if IS_INTERPRETED else "cuda"):
        reasons.append(
            "runs on the CPU alone while TRITON_INTERPRET is set"
            if IS_INTERPRETED
            else f"runs on NVIDIA GPUs alone, and query is on {query.device}"
        )
    elif not IS_INTERPRETED and _capability(query.device) < OLDEST_CAPABILITY:
        reasons.append(f"needs a GPU of compute capability {OLDEST_CAPABILITY}.0 or newer")
    is_double, scale = inputs.compute_dtype == torch.float64, inputs.scale
    widest = WIDEST_DOUBLE if is_double else WIDEST
    limit = f"{widest} in float64" if is_double else f"{widest}"
    for name, x in (("query", query), ("value", inputs.value)):
        if x.shape[3] > widest:
            reasons.append(f"takes heads of at most {limit}, and {name} has a width of {x.shape[3]}")
    if is_double and isinstance(scale, float) and scale != 0 and not 1e-30 < abs(scale) < 1e38:
        reasons.append(f"takes a scale between 1e-30 and 1e38, which is {scale}")
    may_differentiate = torch.is_grad_enabled() or inputs.dropout_p > 0
    if inputs.attn_mask is not None and inputs.attn_mask.requires_grad and may_differentiate:
        reasons.append("has no gradient for attn_mask")
    return reasons + reasons_against_operators()


def _capability(device: torch.device) -> int:
    """The major number; a property, since no compiled function can ask for the capability itself."""
    # where torch only finds out what would be done there may be no GPU
    return torch.cuda.get_device_properties(device).major if torch.cuda.is_available() else OLDEST_CAPABILITY


def why_later(inputs: Inputs) -> str | None:
    """The interpreter is for tests."""
    return "is interpreted, which takes long" if IS_INTERPRETED else None


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse is None where it was not asked for."""
    if inputs.is_causal and inputs.relations is None:
        inputs = _without_later_rows(inputs)
    out, lse, _, _ = operators.run(*arguments(inputs), needs_gradient(inputs))
    return out.to(inputs.query.dtype), lse if inputs.return_lse else None


def _without_later_rows(inputs: Inputs) -> Inputs:
    """Rows of the tables for keys after the query are never read where there are none."""
    rel_k, rel_v = (None if x is None else x[..., : inputs.left + 1, :] for x in (inputs.rel_k, inputs.rel_v))
    return replace(inputs, rel_k=rel_k, rel_v=rel_v, right=0)
