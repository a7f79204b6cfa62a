"""Measure sides in turns: time of one call, ratios within a turn, memory.

What else runs on a machine, and how warm it is, affects all sides of a turn alike: ratios within a turn are
steadier than times. On a GPU the caches are overwritten before each call, which takes the device longer than
the host needs to launch a few kernels: `seconds` is then the device's time, with cold caches, and
`wall_seconds` is what a program sees that waits for the result. On a CPU both are the same.
"""

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from checks import check
from forms import Setting, Tensors, make_step, make_tensors, prepare, why_not
from machine import circumstances
from peak_memory import OverLimit, limited, peak_mib
from records import EMPTY, Record

# seconds; shorter turns measure the clock and the caches that the turn before left
SHORTEST_TURN = 0.02
FEWEST_TURNS = 3
# several times the second-level cache of any GPU; written twice, half a millisecond on an H200
FLUSHED_BYTES = 1 << 30
# the same in two records of one measurement
SAME = ("what", "pass", "side", "device_name", "threads", "torch", "commit", "kernel")
SAME += tuple(x.name for x in fields(Setting))


class Plan(NamedTuple):
    """How to measure a cell.

    Args:
        turns: of each side, at most; 0 to measure memory only.
        seconds: fewer turns, though not below FEWEST_TURNS, if they would take longer.
        memory_limit: GiB that one call may take; a side that needs more is skipped.
        is_checked: compare each side with the reference first.
        has_memory: measure peak memory too.
    """

    turns: int = 15
    seconds: float = 60.0
    memory_limit: float = 8.0
    threads: int = 1
    is_checked: bool = False
    has_memory: bool = False


Step = Callable[[], Any]


class Ready(NamedTuple):
    """A side that is warm, its calls in a turn, and the seconds of a turn."""

    step: Step
    repetitions: int
    seconds: float


class Taken(NamedTuple):
    """Seconds of one call in each turn of one side."""

    device: list[float]
    wall: list[float]


class Clock:
    """Times calls on "cuda" or "cpu"."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.flushed = torch.empty(FLUSHED_BYTES if self.is_cuda else 0, dtype=torch.uint8, device=device)

    def warm(self, step: Step, shortest: float = SHORTEST_TURN) -> Ready:
        """Call the step, which may load and compile code, and count the calls of a turn."""
        self.wall(step)
        once = self.wall(step)
        if self.is_cuda:
            # a turn has two calls
            return Ready(step, 1, 2 * once)
        if once < shortest:
            once = self.wall(step, math.ceil(shortest / 4 / once))
        repetitions = max(1, math.ceil(shortest / once))
        return Ready(step, repetitions, once * repetitions)

    def turn(self, side: Ready) -> tuple[float, float]:
        """(device_seconds, wall_seconds) of one call."""
        wall = self.wall(side.step, side.repetitions)
        return (self.device(side.step) if self.is_cuda else wall), wall

    def device(self, step: Step) -> float:
        """Seconds between two events around the call, its inputs in no cache."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self.flushed.zero_()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def wall(self, step: Step, repetitions: int = 1) -> float:
        """Seconds of one call, from an idle device to an idle device, by the host's clock."""
        self.wait()
        started = time.perf_counter()
        for _ in range(repetitions):
            step()
        self.wait()
        return (time.perf_counter() - started) / repetitions

    def wait(self) -> None:
        """Until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @staticmethod
    def is_lost(device: str) -> bool:
        """Whether the device no longer answers this process. Allocates nothing, which would fail too."""
        try:
            if device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def start_record(
    what: str, setting: Setting, threads: int, *, is_rehearsal: bool = False, **extra: Any
) -> Record:
    """The first fields of a record of attention: the setting and the circumstances."""
    passes = {"pass": "both" if setting.has_backward else "forward"}
    around = circumstances(setting.device, threads, is_rehearsal=is_rehearsal)
    return {"what": what, **extra, **passes, **asdict(setting), **around}


def find(records: Iterable[Record], start: Record, names: Iterable[str], *extra: str) -> list[Record]:
    """The last record of each side that was measured as `start` says; none if it did not run.

    Args:
        extra: fields beside SAME that must be equal.
    """
    known = {tuple(x.get(name) for name in (*SAME, *extra)): x for x in records if not x.get("reason")}
    wanted = (tuple((start | {"side": side}).get(name) for name in (*SAME, *extra)) for side in names)
    return [known[key] for key in wanted if key in known]


def compare(
    names: Iterable[str], setting: Setting, plan: Plan, start: Record, *, against: Iterable[str]
) -> list[Record]:
    """A record for each form of attention, in turns with the others.

    Args:
        start: the first fields of every record.
        against: forms to which ratios are taken.
    Returns:
        The records; only that of the form that broke the GPU for this process, if one did.
    """
    tensors, clock = make_tensors(setting), Clock(setting.device)
    ready: dict[str, Ready] = {}
    found: dict[str, Record] = {}
    for name in names:
        say(start, name)
        record = found[name] = {**EMPTY}
        try:
            if reasons := why_not(name, setting, tensors):
                record["reason"] = "; ".join(reasons)
                continue
            ready[name], record["peak_mib"] = _prepare(name, setting, tensors, plan, clock)
        except (OverLimit, ChildProcessError) as error:
            record["reason"] = str(error)
        except Exception as error:
            # a side may raise anything, and the others can still be measured
            record |= _failure(error)
            if clock.is_lost(setting.device):
                return [{**start, "side": name, **record}]
        gc.collect()
        if clock.is_cuda:
            torch.cuda.empty_cache()
    if plan.turns:
        say(start, "all sides in turns")
        found |= _in_turns(ready, found, plan, clock, against)
    return [{**start, "side": name, **record} for name, record in found.items()]


def measure_steps(
    steps: Mapping[str, Step], plan: Plan, start: Record, *, against: str, shortest: float = SHORTEST_TURN
) -> list[Record]:
    """A record for each step on the CPU, in turns with the others; a step may be anything."""
    clock = Clock("cpu")
    ready = {}
    for name, step in steps.items():
        say(start, name)
        ready[name] = clock.warm(step, shortest)
    taken = take_turns(ready, clock, num_turns(ready, plan))
    around = circumstances("cpu", plan.threads)
    return [{**start, "side": x, **EMPTY, **timing(x, taken, [against]), **around} for x in steps]


def take_turns(ready: Mapping[str, Ready], clock: Clock, turns: int) -> dict[str, Taken]:
    """Seconds of one call for each side and turn; within a turn the sides run in a random order."""
    taken = {name: Taken([], []) for name in ready}
    for turn in range(turns):
        for name in random.Random(turn).sample(sorted(ready), len(ready)):
            device, wall = clock.turn(ready[name])
            taken[name].device.append(device)
            taken[name].wall.append(wall)
    return taken


def num_turns(ready: Mapping[str, Ready], plan: Plan) -> int:
    """The turns of the plan, or fewer if they would take too long."""
    one = sum(side.seconds for side in ready.values())
    affordable = plan.turns if one == 0 else int(plan.seconds / one)
    return min(plan.turns, max(FEWEST_TURNS, affordable))


def timing(name: str, taken: Mapping[str, Taken], against: Iterable[str]) -> Record:
    """The fields of a record that come from turns."""
    own = taken[name]
    to = {other: ratio(own.device, taken[other].device) for other in against if other in taken}
    return {
        "seconds": statistics.median(own.device),
        "wall_seconds": statistics.median(own.wall),
        "ratio_to": {other: median for other, (median, _) in to.items()},
        "quartiles_to": {other: quartiles for other, (_, quartiles) in to.items()},
        "turns": len(own.device),
    }


def ratio(own: list[float], other: list[float]) -> tuple[float, list[float]]:
    """The median of the ratios within a turn, and their quartiles."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return round(statistics.median(ratios), 3), [round(low, 3), round(high, 3)]


def say(start: Record, side: str) -> None:
    """Progress, on standard error."""
    names = ("row", "grid", "size", "length", "d_k", "max_distance", "pass")
    words = " ".join(f"{name} {start[name]}" for name in names if name in start)
    print(f"{start['what']}, {words}: {side}", file=sys.stderr, flush=True)


def _prepare(
    name: str, setting: Setting, tensors: Tensors, plan: Plan, clock: Clock
) -> tuple[Ready, float | None]:
    """The form, checked and warm, and its peak memory in MiB."""
    limit, peak = round(plan.memory_limit * 2**30), None
    if clock.is_cuda:
        limit = min(limit, torch.cuda.mem_get_info()[0])
    elif plan.has_memory:
        small = replace(setting, length=min(128, setting.length))
        make, warm_up = partial(make_step, name, setting), partial(make_step, name, small)
        peak = peak_mib(make, limit=limit, threads=plan.threads, warm_up=warm_up)
    with limited(limit, setting.device):
        step = prepare(name, setting, tensors)
        if plan.is_checked:
            check(name, setting, tensors, step())
    if clock.is_cuda and plan.has_memory:
        peak = peak_mib(lambda: step, limit=limit, device="cuda")
    with limited(limit, setting.device):
        ready = clock.warm(step) if plan.turns else Ready(step, 1, 0.0)
    return ready, None if peak is None else round(peak, 2)


def _in_turns(
    ready: dict[str, Ready], found: dict[str, Record], plan: Plan, clock: Clock, against: Iterable[str]
) -> dict[str, Record]:
    """The records of the sides that are ready, with times; if one fails, all have the reason."""
    try:
        taken = take_turns(ready, clock, num_turns(ready, plan))
    except Exception as error:
        return {name: found[name] | _failure(error, "in turns with the others: ") for name in ready}
    return {name: found[name] | timing(name, taken, against) for name in ready}


def _failure(error: Exception, where: str = "") -> Record:
    first = next(iter(str(error).strip().splitlines()), "")
    return {"reason": f"{where}{type(error).__name__}: {first}", "is_failure": True}
