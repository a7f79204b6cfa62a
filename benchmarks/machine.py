"""What a figure was measured on and with: the processor, the commit."""

import platform
import subprocess
from pathlib import Path

import torch


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
