"""Seconds of one call on a GPU, by the device's own clock, for several sides that take turns.

Before each call the caches are overwritten, which takes the device longer than the host needs to launch a
few kernels: so `seconds` is what the device takes, and `wall_seconds`, from an idle device to an idle device,
is what a program that waits for the result sees. On a CPU, in a rehearsal, both are the host's clock.
"""

import random
import time
from dataclasses import dataclass, field

import torch

from attention_forms import Step
from measuring import Runner

# several times the second-level cache of any GPU; written twice, half a millisecond on an H200
FLUSHED_BYTES = 1 << 30


@dataclass
class Taken:
    """Seconds of one call, for each turn of one side."""

    device: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


class Clock:
    """Times calls on "cuda", or rehearses it on "cpu"."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.flushed = torch.empty(FLUSHED_BYTES if self.is_cuda else 0, dtype=torch.uint8, device=device)

    def both_seconds(self, step: Step) -> tuple[float, float]:
        """(device_seconds, wall_seconds), of two calls; in a rehearsal of one call, which is slow enough."""
        wall = self.wall_seconds(step)
        return (self.device_seconds(step) if self.is_cuda else wall), wall

    def device_seconds(self, step: Step) -> float:
        """Between two events around the call, its inputs in no cache."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self.flushed.zero_()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def wall_seconds(self, step: Step) -> float:
        """From an idle device to an idle device, by the host's clock."""
        self.wait()
        started = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize()


def take_turns(runners: dict[str, Runner], clock: Clock, turns: int) -> dict[str, Taken]:
    """Both times of each side for each turn; within a turn the sides run in a random order."""
    taken = {name: Taken() for name in runners}
    for turn in range(turns):
        for name in random.Random(turn).sample(sorted(runners), len(runners)):
            of_device, of_wall = clock.both_seconds(runners[name].step)
            taken[name].device.append(of_device)
            taken[name].wall.append(of_wall)
    return taken
