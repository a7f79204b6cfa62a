"""Where the time of a training step goes: relpos' Python around attention, and torch's operators."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from relpos import functional
from relpos.nn import _attention, _layers
from relpos.translation import model

STEPS = 4
OPERATORS = 12
# functions of a forward pass, none of which calls another
TIMED: dict[str, tuple[tuple[Any, str], ...]] = {
    "arguments of modules, checked": (
        (_layers, "check_self"),
        (_layers.RelativeTransformerDecoderLayer, "_check"),
        (_attention.RelativeMultiheadAttention, "_check"),
        (_attention, "check_masks"),
    ),
    "masks of modules, merged": ((_attention.RelativeMultiheadAttention, "merge_masks"),),
    "arguments of attention, checked": ((functional, "check"),),
    "attention, forward": ((functional, "dispatch"),),
    "sinusoids, forward": ((model, "sinusoids"),),
}


def profile(step: Callable[[], None]) -> str:
    """A table of what functions of relpos take in a step, and one of the operators that take the most."""
    return f"{_functions(step)}\n{_operators(step)}"


def _functions(step: Callable[[], None]) -> str:
    """Milliseconds and calls of a step, by perf_counter, which a step hardly feels."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    def timed(label: str, function: Callable) -> Callable:
        def run(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                seconds[label] += time.perf_counter() - started
                calls[label] += 1

        return run

    with ExitStack() as patches:
        for label, places in TIMED.items():
            for owner, name in places:
                patches.enter_context(mock.patch.object(owner, name, timed(label, getattr(owner, name))))
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        whole = time.perf_counter() - started
    lines = [_line("step", whole, whole, STEPS)]
    lines += [_line(label, seconds[label], whole, calls[label]) for label in TIMED if calls[label]]
    return "\n".join(lines)


def _operators(step: Callable[[], None]) -> str:
    """Milliseconds and calls of a step under torch.profiler, without what an operator calls."""
    with torch_profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
    events = sorted(found.key_averages(), key=lambda x: -x.self_cpu_time_total)
    whole = sum(x.self_cpu_time_total for x in events) / 1e6
    shown = [x for i, x in enumerate(events) if i < OPERATORS or x.key.startswith("relpos::")]
    return "\n".join(_line(x.key, x.self_cpu_time_total / 1e6, whole, x.count) for x in shown)


def _line(label: str, seconds: float, whole: float, calls: int) -> str:
    share = seconds / whole
    return f"  {label[:46]:46} {seconds / STEPS * 1e3:9.2f} ms {share:7.1%} {calls / STEPS:8g} calls"
