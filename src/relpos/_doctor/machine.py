"""Processor, memory and GPUs."""

import math
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from _relpos_command import CHOSEN, cpu_quota
from relpos._doctor.check import Complain, Finding, Probe


def machine_probes() -> dict[str, Probe]:
    """The probes for the processor, its memory and GPUs."""
    return {
        "processor": _processor,
        "instructions": _instructions,
        "threads": _threads,
        "memory": _memory,
        "GPU": _gpu,
    }


def devices(complain: Complain) -> Finding:
    """The names of the CPU, and of one GPU of each kind that torch can use."""
    names = ["cpu"]
    if torch.cuda.is_available():
        first = {torch.cuda.get_device_name(i): i for i in reversed(range(torch.cuda.device_count()))}
        names += [f"cuda:{i}" for i in sorted(first.values())]
    elif torch.accelerator.is_available():
        names.append(str(torch.accelerator.current_accelerator()))
    return Finding({"names": names}, ", ".join(names))


def _processor(complain: Complain) -> Finding:
    name = _processor_name() or platform.processor() or platform.machine()
    cores, quota = num_cores(), cpu_quota()
    limit = "" if quota is None else f", {quota:g} CPUs by the quota of its control group"
    value = {"name": name, "cores": cores, "quota": quota}
    return Finding(value, f"{name}, {_count(cores, 'core')} for this process{limit}")


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


def num_cores() -> int:
    """Cores, counting hyperthreads, that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _instructions(complain: Complain) -> Finding:
    used = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    if platform.machine().lower() in ("x86_64", "amd64") and not used.startswith("AVX"):
        complain(
            "torch uses no vector instructions of this processor.",
            "Unset ATEN_CPU_CAPABILITY." if limit else "Use a processor, or a virtual machine, with AVX2.",
        )
    return Finding({"used": used, "limit": limit}, f"{used}, the widest that torch uses here")


def _threads(complain: Complain) -> Finding:
    threads, cores = torch.get_num_threads(), num_cores()
    quota = cpu_quota()
    if quota is not None and math.ceil(quota) < cores:
        cores = max(1, math.ceil(quota))
    limit = os.environ.get("OMP_NUM_THREADS")
    # OpenMP takes a list too, a number for each level; torch uses the first
    first = "" if limit is None else limit.partition(",")[0].strip()
    is_number = first.isascii() and first.isdigit() and int(first) > 0
    advice = "Unset OMP_NUM_THREADS, or set it to the cores that you mean to use."
    if threads * 2 < cores:
        complain(f"torch computes with {_count(threads, 'thread')} on {cores} cores.", advice)
    elif threads > cores:
        complain(f"torch computes with {threads} threads on {_count(cores, 'core')}: they wait.", advice)
    if limit is not None and not is_number:
        complain(f"OMP_NUM_THREADS must be a positive integer; it is {limit!r}, which torch ignores.", advice)
    elif is_number and int(first) > cores >= threads:
        complain(
            f"OMP_NUM_THREADS asks for {first} threads on {_count(cores, 'core')}; "
            f"torch computes with {threads}.",
            advice,
        )
    by_command = "OMP_NUM_THREADS" in os.environ.get(CHOSEN, "").split(",")
    source = "" if limit is None else f", OMP_NUM_THREADS={limit}"
    source += ", chosen by this command for the quota" if by_command else ""
    return Finding({"threads": threads, "OMP_NUM_THREADS": limit}, f"{threads} for torch{source}")


def _memory(complain: Complain) -> Finding:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return Finding({"bytes": None}, "not known on this system")
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding({"bytes": num_bytes}, _gibibytes(num_bytes))


def _gpu(complain: Complain) -> Finding:
    if torch.cuda.is_available():
        gpus = [_cuda(i, complain) for i in range(torch.cuda.device_count())]
        lines = [
            f"{i}: {gpu['name']}, compute capability {gpu['capability']}, {_gibibytes(gpu['bytes'])}"
            for i, gpu in enumerate(gpus)
        ]
        return Finding({"devices": gpus}, "\n".join(lines))
    if torch.accelerator.is_available():
        name = str(torch.accelerator.current_accelerator())
        return Finding({"devices": [{"name": name}]}, name)
    if _has_nvidia_driver():
        if torch.version.cuda is None:
            complain(
                "there is a driver for an NVIDIA GPU, and torch is built for the CPU.",
                "Install a build of torch for CUDA; PyTorch's install page names it.",
            )
        else:
            complain(
                f"torch is built for CUDA {torch.version.cuda} and finds no GPU.",
                "Check CUDA_VISIBLE_DEVICES, and with nvidia-smi that the driver runs and is new enough.",
            )
    return Finding({"devices": []}, "none that torch can use")


def _cuda(index: int, complain: Complain) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    if torch.version.cuda is not None and not _is_built_for((major, minor), torch.cuda.get_arch_list()):
        complain(
            f"this torch has no kernels for {properties.name}, compute capability {major}.{minor}.",
            "Install a build of torch for it; PyTorch's install page names it.",
        )
    return {
        "name": properties.name,
        "capability": f"{major}.{minor}",
        "bytes": properties.total_memory,
    }


def _is_built_for(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether one of `built`, such as sm_90 or compute_120, runs on a GPU of this capability."""
    for name in built:
        kind, _, digits = name.partition("_")
        numbers = "".join(sign for sign in digits if sign.isdigit())
        version = (int(numbers[:-1] or 0), int(numbers[-1:] or 0))
        # machine code runs within its major version, PTX on whatever came later
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
