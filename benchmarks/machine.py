"""What a figure was measured on and with: the processor, the commit, the kernel."""

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from relpos.backends.cpu import backend as cpu


def device_name(device: str) -> str:
    """What the maker calls the processor behind torch's `device`, "cpu" or "cuda"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def commit() -> str:
    """The short name of the commit that is checked out; empty outside a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()


@cache
def kernel() -> str | None:
    """The instruction set of the CPU kernel and how its SHA-256 begins; None where there is no kernel."""
    name = cpu.instruction_set()
    return None if name is None else f"{name} {hashlib.sha256(cpu.LIBRARY.read_bytes()).hexdigest()[:8]}"
