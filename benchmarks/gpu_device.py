"""The NVIDIA GPU that figures are measured on, and what stands in for it in a rehearsal.

    python benchmarks/gpu_device.py [--rehearse]

prints the name of the file for the records of this machine, or says in one line what is missing.
"""

import argparse
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch

from records import circumstances

REHEARSAL = "gpu-rehearsal.jsonl"


def main(arguments: list[str] | None = None) -> None:
    """Print the name of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where nothing is measured")
    options = parser.parse_args(arguments)
    require_gpu(options.rehearse)
    print(file_name(options.rehearse))


def require_gpu(is_rehearsal: bool) -> None:
    """End with status 2 and one line where there is no GPU to measure on, unless none is needed."""
    reason = None if is_rehearsal else why_no_gpu()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(2)


def why_no_gpu() -> str | None:
    """What is missing for a measurement, as a sentence with a way out; None where nothing is."""
    if torch.version.cuda is None:
        build = "CPUs" if torch.version.hip is None else "AMD GPUs"
        return (
            f"an NVIDIA GPU and torch for CUDA are needed; this torch, {torch.__version__}, is for {build}. "
            "Give --rehearse to run everything in small on the CPU, measuring nothing."
        )
    if not torch.cuda.is_available():
        return (
            f"an NVIDIA GPU is needed; torch {torch.__version__} sees none here. "
            "Check nvidia-smi, or give --rehearse to run everything in small on the CPU, measuring nothing."
        )
    if torch.cuda.get_device_capability() < (8, 0):
        return (
            "a GPU of compute capability 8.0 or above is needed for bfloat16; "
            f"got {capability()}, {torch.cuda.get_device_name()}. Use an A100 or newer, or give --rehearse."
        )
    return None


def file_name(is_rehearsal: bool) -> str:
    """gpu-h200.jsonl for an "NVIDIA H200"."""
    if is_rehearsal:
        return REHEARSAL
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower().replace("nvidia", ""))
    return f"gpu-{'-'.join(words)}.jsonl"


def gpu_circumstances(is_rehearsal: bool) -> dict[str, Any]:
    """`circumstances` and what a figure of a GPU depends on beside them; rehearsals are marked."""
    device = "cpu" if is_rehearsal else "cuda"
    return {
        "rehearsal": is_rehearsal,
        **circumstances(device, torch.get_num_threads()),
        "capability": None if is_rehearsal else capability(),
        "driver": None if is_rehearsal else _driver(),
        "cuda": torch.version.cuda,
        "triton": _triton(),
    }


def capability() -> str:
    """9.0 for an H100 or H200."""
    return ".".join(map(str, torch.cuda.get_device_capability()))


def _driver() -> str | None:
    """The version of the driver; None where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _triton() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
