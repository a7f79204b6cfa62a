"""What a backend is: a name and a few functions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relpos._inputs import Inputs

RunFunction = Callable[[Inputs], tuple[Tensor, Tensor | None]]


class Backend(NamedTuple):
    """One way of computing attention.

    Args:
        name: what a user writes in `backend=`.
        why_not: every reason why it cannot take these inputs; an empty list where it can.
            A backend never drops a term.
        run: (out, lse), lse None where it was not asked for.
        why_later: why it should leave inputs that it can take to a later backend that can, or None.
    """

    name: str
    why_not: Callable[[Inputs], list[str]]
    run: RunFunction
    why_later: Callable[[Inputs], str | None] = lambda inputs: None


def no_second_derivative(name: str) -> NotImplementedError:
    """The error of a backend whose gradient has none, and what to do."""
    return NotImplementedError(
        f'backend "{name}" has no second derivative. Give backend="dense" to relative_attention or '
        "relation_attention, or to the module of relpos.nn, which keeps it as its attribute `backend`."
    )


def reasons_against_operators() -> list[str]:
    """Why a backend that is an operator of relpos cannot be called now; empty where it can."""
    reasons = []
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        reasons.append("is an operator of relpos, which no exported program should need")
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        reasons.append("has no rules for torch.func and forward-mode derivatives")
    return reasons
