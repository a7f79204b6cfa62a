"""Processor, threads and GPUs."""

import math
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from _relpos_command import CHOSEN, cpu_quota, num_cores
from relpos._doctor.check import Check, Result, Warn


def machine_checks() -> dict[str, Check]:
    """The checks of the processor, torch's threads and the GPUs."""
    return {"processor": _processor, "instructions": _instructions, "threads": _threads, "GPU": _gpu}


def devices(warn: Warn) -> Result:
    """The CPU, and one GPU of each model that torch can use."""
    names = ["cpu"]
    if torch.cuda.is_available():
        first = {torch.cuda.get_device_name(i): i for i in reversed(range(torch.cuda.device_count()))}
        names += [f"cuda:{i}" for i in sorted(first.values())]
    elif torch.accelerator.is_available():
        names.append(str(torch.accelerator.current_accelerator()))
    return Result({"names": names}, ", ".join(names))


def _processor(warn: Warn) -> Result:
    name = _processor_name() or platform.processor() or platform.machine()
    cores, quota = num_cores(), cpu_quota()
    limit = "" if quota is None else f", limited to {quota:g} CPUs by its control group"
    value = {"name": name, "cores": cores, "quota": quota}
    return Result(value, f"{name}, {_count(cores, 'core')} for this process{limit}")


def _processor_name() -> str | None:
    if platform.system() == "Linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        except OSError:
            # a sandbox may have no /proc
            return None
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, None)
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def _instructions(warn: Warn) -> Result:
    used, limit = torch.backends.cpu.get_cpu_capability(), os.environ.get("ATEN_CPU_CAPABILITY")
    if platform.machine().lower() in ("x86_64", "amd64") and not used.startswith("AVX"):
        advice = "Unset ATEN_CPU_CAPABILITY." if limit else "Use a machine, real or virtual, with AVX2."
        warn("torch uses no vector instructions.", advice)
    return Result({"used": used, "limit": limit}, f"{used}, the widest that torch uses")


def _threads(warn: Warn) -> Result:
    threads, cores, quota = torch.get_num_threads(), num_cores(), cpu_quota()
    if quota is not None:
        cores = min(cores, max(1, math.ceil(quota)))
    limit = os.environ.get("OMP_NUM_THREADS")
    advice = "Unset OMP_NUM_THREADS, or set it to the number of cores to use."
    if threads * 2 < cores:
        warn(f"torch computes with {_count(threads, 'thread')} on {cores} cores.", advice)
    elif threads > cores:
        warn(f"torch computes with {threads} threads on {_count(cores, 'core')}.", advice)
    if limit is not None and not _is_positive(limit):
        warn(f"OMP_NUM_THREADS must be a positive integer; got {limit!r}, which torch ignores.", advice)
    source = "" if limit is None else f", OMP_NUM_THREADS={limit}"
    if "OMP_NUM_THREADS" in os.environ.get(CHOSEN, "").split(","):
        source += ", set by this command to fit the control group"
    return Result({"threads": threads, "OMP_NUM_THREADS": limit}, f"{threads} for torch{source}")


def _is_positive(limit: str) -> bool:
    # OpenMP takes a list, one number for each level of nesting; torch uses the first
    first = limit.partition(",")[0].strip()
    return first.isascii() and first.isdigit() and int(first) > 0


def _gpu(warn: Warn) -> Result:
    if torch.cuda.is_available():
        # of a GPU that this torch has no kernels for, torch itself warns
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        values = [
            {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "bytes": gpu.total_memory}
            for gpu in gpus
        ]
        lines = [
            f"{i}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB"
            for i, gpu in enumerate(gpus)
        ]
        return Result({"devices": values}, "\n".join(lines))
    if torch.accelerator.is_available():
        name = str(torch.accelerator.current_accelerator())
        return Result({"devices": [{"name": name}]}, name)
    if _has_nvidia_driver():
        if torch.version.cuda is None:
            warn(
                "This machine has an NVIDIA driver, but torch is built for the CPU.",
                "Install a build of torch for CUDA: see PyTorch's install page.",
            )
        else:
            warn(
                f"torch is built for CUDA {torch.version.cuda} but finds no GPU.",
                "Check CUDA_VISIBLE_DEVICES, and run nvidia-smi to see whether the driver works.",
            )
    return Result({"devices": []}, "none that torch can use")


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
