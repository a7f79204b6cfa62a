"""Seconds of one call for several forms of attention that take turns in one process.

What else runs on a machine, and how warm it is, meets all forms of a turn alike: ratios within a turn are
steadier than either side.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from attention_forms import Setting, Step, Tensors, make_tensors, prepare, why_not
from peak_memory import OverLimit, limited

# seconds; shorter turns measure the clock and the caches that the turn before left
SHORTEST_TURN = 0.02
FEWEST_TURNS = 3


class Runner(NamedTuple):
    """A form that is ready to run, and how many calls make a turn."""

    step: Step
    repetitions: int
    turn_seconds: float


class Plan(NamedTuple):
    """How long to measure one setting.

    Args:
        turns: of each form, at most.
        seconds: fewer turns, though not below FEWEST_TURNS, where they would take longer than that.
        memory_limit: bytes that one call may have beyond what is there; a form that wants more is skipped.
    """

    turns: int = 15
    seconds: float = 60.0
    memory_limit: int = 8 << 30


def time_forms(
    names: Iterable[str], setting: Setting, plan: Plan, say: Callable[[str], None] = lambda what: None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of one call, for each form and turn; and why the others did not run.

    Args:
        say: is told what comes next.
    """
    tensors = make_tensors(setting)
    runners: dict[str, Runner] = {}
    reasons: dict[str, str] = {}
    for name in names:
        say(name)
        if against := why_not(name, setting, tensors):
            reasons[name] = "; ".join(against)
            continue
        try:
            with limited(plan.memory_limit, setting.device):
                runners[name] = _runner(name, setting, tensors)
        except OverLimit as error:
            reasons[name] = str(error)
        gc.collect()
    say("all forms in turns")
    return take_turns(runners, setting.device, num_turns(runners, plan)), reasons


def num_turns(runners: dict[str, Runner], plan: Plan) -> int:
    """As many as asked for, or fewer where they would take too long."""
    one = sum(runner.turn_seconds for runner in runners.values())
    affordable = plan.turns if one == 0 else int(plan.seconds / one)
    return min(plan.turns, max(FEWEST_TURNS, affordable))


def take_turns(runners: dict[str, Runner], device: str, turns: int) -> dict[str, list[float]]:
    """Seconds of one call for each form and turn; within a turn the forms run in a random order."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(turns):
        for name in random.Random(turn).sample(sorted(runners), len(runners)):
            runner = runners[name]
            seconds[name].append(_turn(runner.step, runner.repetitions, device))
    return seconds


def ratio(own: list[float], other: list[float]) -> dict[str, Any]:
    """The median of the ratios within a turn, and their quartiles, as "ratio" and "ratio_quartiles"."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"ratio": round(statistics.median(ratios), 3), "ratio_quartiles": [round(low, 3), round(high, 3)]}


def _runner(name: str, setting: Setting, tensors: Tensors) -> Runner:
    step = prepare(name, setting, tensors)
    # the first call loads code, and may compile
    _turn(step, 1, setting.device)
    once = _turn(step, 1, setting.device)
    if once < SHORTEST_TURN:
        once = _turn(step, math.ceil(SHORTEST_TURN / 4 / once), setting.device)
    repetitions = max(1, math.ceil(SHORTEST_TURN / once))
    return Runner(step, repetitions, once * repetitions)


def _turn(step: Step, repetitions: int, device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(repetitions):
        step()
    wait()
    return (time.perf_counter() - started) / repetitions
