"""From checked inputs to the backend that computes them."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from relpos import _reference as reference
from relpos._inputs import Inputs
from relpos.backends import BACKENDS, dense
from relpos.backends.backend import Backend

Result = TypeVar("Result")


class BackendTable(dict[str, list[str]]):
    """The reasons against each backend, in the order in which they are tried; print it to read it.

    Attributes:
        later: why a backend that fits should leave these inputs to one behind it, by its name.
    """

    def __init__(self, reasons: dict[str, list[str]], later: dict[str, str] | None = None) -> None:
        super().__init__(reasons)
        self.later = later or {}

    @property
    def chosen(self) -> str | None:
        """What is taken: the first that fits, unless it leaves them to another that does."""
        fitting = [name for name, reasons in self.items() if not reasons]
        return next((name for name in fitting if name not in self.later), next(iter(fitting), None))

    def __str__(self) -> str:
        lines = []
        for name, reasons in self.items():
            verdict = "; ".join(reasons) or ("chosen" if name == self.chosen else "fits, but comes later")
            if not reasons and name in self.later and name != self.chosen:
                verdict = f"fits, but {self.later[name]}"
            lines.append(f"{name}: {verdict}")
        return "\n".join(lines)


def explain(inputs: Inputs) -> BackendTable:
    """The reasons against each backend."""
    later = {backend.name: backend.why_later(inputs) for backend in BACKENDS}
    return BackendTable(
        {backend.name: backend.why_not(inputs) for backend in BACKENDS},
        {name: reason for name, reason in later.items() if reason is not None},
    )


def check_backend(name: str | None) -> None:
    """Refuse what is no name of a backend.

    Raises:
        ValueError: no backend has this name.
    """
    if name is not None and name not in _names():
        raise ValueError(
            f"backend must be None or one of {', '.join(_names())}; got {name!r}. "
            "Leave it out to let relpos choose."
        )


def dispatch(inputs: Inputs, name: str | None) -> tuple[Tensor, Tensor | None]:
    """(out, lse) from the first backend that fits, or from the one that is named.

    Raises:
        ValueError: no backend has this name. NotImplementedError: no backend fits, or the named one does not.
    """
    if name == "reference":
        return _run(reference.run, inputs)
    backend = _first(inputs) if name is None else _named(inputs, name)
    return _run(backend.run, inputs)


def dispatch_with_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, weights), by `dense`: no other backend has the weights in full."""
    return _run(dense.run_with_weights, inputs)


def _first(inputs: Inputs) -> Backend:
    for takes_any in (False, True):
        for backend in BACKENDS:
            if _is_taken(backend, inputs, takes_any):
                return backend
    raise NotImplementedError(f"no backend can run this attention:\n{explain(inputs)}")


def _is_taken(backend: Backend, inputs: Inputs, takes_any: bool) -> bool:
    if torch.compiler.is_compiling():
        # sizes last: a comparison ties the graph to them
        return not backend.why_not(inputs) and (takes_any or backend.why_later(inputs) is None)
    # sizes first: a reason may ask what a mask holds
    return (takes_any or backend.why_later(inputs) is None) and not backend.why_not(inputs)


def _named(inputs: Inputs, name: str) -> Backend:
    check_backend(name)
    backend = next(backend for backend in BACKENDS if backend.name == name)
    reasons = backend.why_not(inputs)
    if reasons:
        raise NotImplementedError(
            f"backend {name!r} cannot run this attention:\n{BackendTable({name: reasons})}"
        )
    return backend


def _names() -> list[str]:
    return [*(backend.name for backend in BACKENDS), "reference"]


def _run(run: Callable[[Inputs], Result], inputs: Inputs) -> Result:
    # autocast would take the matrix products to low precision one by one; backends decide where sums are kept
    kind = inputs.query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return run(inputs)
    return run(inputs)
