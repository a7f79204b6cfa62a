"""The circumstances of a measurement: processor or GPU, versions, commit, kernel.

    python benchmarks/machine.py [--rehearse]

prints the name of the file for the records of this machine's GPU, or the reason why it cannot measure.
"""

import hashlib
import importlib.util
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from records import plain_parser
from relpos.backends.cpu import backend as cpu


def main(arguments: list[str] | None = None) -> None:
    """Print the name of the file."""
    parser = plain_parser(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="name the file of a rehearsal on the CPU")
    is_rehearsal = parser.parse_args(arguments).rehearse
    require_gpu(is_rehearsal)
    name = "rehearsal" if is_rehearsal else torch.cuda.get_device_name().lower().replace("nvidia", "")
    print(f"gpu-{'-'.join(re.findall(r'[a-z0-9]+', name))}.jsonl")


def circumstances(device: str, threads: int, *, is_rehearsal: bool = False) -> dict[str, Any]:
    """Everything else that a figure depends on. `device` is "cpu" or "cuda"."""
    is_cuda = device == "cuda"
    return {
        "device": device,
        "device_name": device_name(device),
        "machine": platform.machine(),
        "threads": threads,
        "torch": torch.__version__,
        "commit": commit(),
        "kernel": kernel(),
        "capability": capability() if is_cuda else None,
        "driver": _driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "triton": importlib.util.find_spec("triton") and metadata.version("triton"),
        "rehearsal": is_rehearsal,
    }


def require_gpu(is_rehearsal: bool) -> None:
    """End with status 2 and one line if there is no GPU to measure on and this is no rehearsal."""
    reason = None if is_rehearsal else why_no_gpu()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(2)


def why_no_gpu() -> str | None:
    """The reason why nothing can be measured, with a way out, as a sentence; None if it can."""
    way_out = "Give --rehearse to run everything in small on the CPU, measuring nothing."
    if torch.version.cuda is None:
        return f"an NVIDIA GPU and torch for CUDA are needed; torch {torch.__version__} is not. {way_out}"
    if not torch.cuda.is_available():
        return f"an NVIDIA GPU is needed; torch {torch.__version__} sees none. Check nvidia-smi. {way_out}"
    if torch.cuda.get_device_capability() < (8, 0):
        needs = "a GPU of compute capability 8.0 or above is needed for bfloat16"
        return f"{needs}; got {capability()}, {torch.cuda.get_device_name()}. Use an A100 or newer. {way_out}"
    return None


def device_name(device: str) -> str:
    """The maker's name of the processor or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def capability() -> str:
    """9.0 for an H100 or H200."""
    return ".".join(map(str, torch.cuda.get_device_capability()))


@cache
def commit() -> str:
    """The short name of the commit that is checked out; empty outside a repository."""
    return _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD") or ""


@cache
def kernel() -> str | None:
    """The instruction set of the CPU kernel and the first digits of its SHA-256; None without a kernel."""
    name = cpu.instruction_set()
    return None if name is None else f"{name} {hashlib.sha256(cpu.LIBRARY.read_bytes()).hexdigest()[:8]}"


@cache
def _driver() -> str | None:
    """The version of the driver; None if nvidia-smi does not say."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    main()
