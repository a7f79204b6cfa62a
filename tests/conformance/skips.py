"""The backends as parameters of a test, and what each may refuse: only these reasons may skip a case.

A case that a backend skips for any other reason fails the run, and so does a backend that runs too few of
them: see required.py. A line here is a limit of that backend which its documentation states.
"""

from typing import Any

import pytest

from relpos.backends import BACKENDS
from relpos.backends.cpu import backend as cpu
from relpos.backends.triton import backend as triton

# backend -> how each reason of its why_not begins that stands for such a limit
# and a machine that may lack it: a whole run that must not is one with --require-backends
MAY_SKIP: dict[str, tuple[str, ...]] = {
    "cpu": (
        "was not built",
        "has no gradient for attn_mask",
        "is an operator of relpos, which no exported program should need",
        "has no rules for torch.func and forward-mode derivatives",
    ),
    "triton": (
        "needs a build of torch for CUDA",
        "needs Triton",
        "has no gradient for attn_mask",
        "is an operator of relpos, which no exported program should need",
        "has no rules for torch.func and forward-mode derivatives",
    ),
    "merged": (
        "runs on the CPU and CUDA",
        "takes NVIDIA's GPUs alone",
        "has no fused kernel for float64 on CUDA",
        "has no fused kernel for 16 bits on",
        "takes no attn_mask on CUDA",
        "supports relative_attention only",
        "takes no attn_mask but a bool one that hides keys at the end",
        "has no dropout",
        "is an operator of relpos, which no exported program should need",
        "has no rules for torch.func and forward-mode derivatives",
    ),
}

# the share of the cases that each backend runs at least, where the whole suite runs
LEAST_SHARE = 0.5


def each_backend(*without: str) -> list[Any]:
    """Values of a parameter `backend`; where this machine cannot run one, it is skipped and says why."""
    found = []
    for backend in BACKENDS:
        reason = {"cpu": cpu.UNAVAILABLE, "triton": triton.UNAVAILABLE}.get(backend.name)
        marks = [] if reason is None else [pytest.mark.skip(reason=f"{backend.name}: {reason}")]
        if backend.name not in without:
            found.append(pytest.param(backend.name, marks=marks))
    return found
