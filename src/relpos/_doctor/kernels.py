"""The kernels: whether the CPU kernel loads, and whether Triton can compile the GPU kernels."""

import os
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from relpos._doctor.check import Check, Result, Warn
from relpos.backends.cpu import backend as cpu
from relpos.backends.triton import backend as triton

_INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


def kernel_checks() -> dict[str, Check]:
    """The checks of the CPU kernel and of the GPU kernels."""
    return {"CPU kernel": _cpu_kernel, "GPU kernels": _gpu_kernels}


def _cpu_kernel(warn: Warn) -> Result:
    is_built, is_loaded = cpu.LIBRARY.exists(), cpu.UNAVAILABLE is None
    limit = os.environ.get("RELPOS_CPU") or None
    is_unknown = limit is not None and limit not in _INSTRUCTION_SETS
    value = {
        "path": str(cpu.LIBRARY),
        "built": is_built,
        "loads": is_loaded,
        "reason": cpu.UNAVAILABLE,
        "instructions": None if is_unknown else cpu.instruction_set(),
        "limit": limit,
    }
    if is_unknown:
        warn(
            f"RELPOS_CPU must be one of {', '.join(_INSTRUCTION_SETS)}; got {limit!r}. The kernel raises.",
            "Unset RELPOS_CPU.",
        )
    if is_loaded:
        source = "" if limit is None else f", RELPOS_CPU={limit}"
        state = "raises" if is_unknown else f"instructions {value['instructions']}"
        return Result(value, f"loads, {state}{source}\nfrom {cpu.LIBRARY}")
    if not is_built and sys.platform == "win32":
        return Result(value, "none for Windows")
    warn(
        f"The CPU kernel {'does not load' if is_built else 'is missing'}: attention on the CPU is slower.",
        _build_advice(),
    )
    return Result(value, f"{cpu.UNAVAILABLE}\n{'from' if is_built else 'expected at'} {cpu.LIBRARY}")


def _build_advice() -> str:
    if os.environ.get("RELPOS_CPU_KERNEL"):
        return "Unset RELPOS_CPU_KERNEL, or set it to a kernel built for this torch and this machine."
    sources = Path(__file__).parents[3]
    where = f"-e {sources}" if (sources / "setup.py").exists() else "FOLDER_OF_THE_SOURCES"
    return (
        f"Install g++ or clang++, then run `pip install -v --no-deps {where}`. "
        "If it builds no kernel, its output says why."
    )


def _gpu_kernels(warn: Warn) -> Result:
    version, is_installed = _triton_version(), find_spec("triton") is not None
    name, reason = f"Triton {version}" if version else "Triton", triton.UNAVAILABLE
    value = {
        "available": reason is None,
        "reason": reason,
        "triton": version,
        "interpreted": triton.IS_INTERPRETED,
    }
    if triton.IS_INTERPRETED:
        warn(
            "TRITON_INTERPRET is set: the GPU kernels run on the CPU, very slowly.", "Unset TRITON_INTERPRET."
        )
    if reason is None:
        how = "interpreted on the CPU" if triton.IS_INTERPRETED else "compiled at their first call"
        return Result(value, f"{how} by {name}")
    is_needed = triton.IS_INTERPRETED or torch.version.cuda is not None
    if is_needed and reason.startswith(triton.NO_LAUNCH):
        for missing in triton.missing_to_launch() if torch.cuda.is_available() else []:
            advice = "Install Python's headers: package python3-dev or python3-devel on most systems."
            if "compiler" in missing:
                advice = "Install gcc or clang, or set CC to a C compiler."
            warn(f"Triton needs {missing}.", advice)
    elif is_needed:
        state = f"{name} does not import" if is_installed else "Triton is not installed"
        warn(
            f"{state}: attention on GPUs is slower.",
            f'pip install {"--force-reinstall " if is_installed else ""}"{_triton_requirement()}"',
        )
    return Result(value, f"none: {reason}")


def _triton_version() -> str | None:
    """From its metadata, or from the module where it is imported already."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get("triton"), "__version__", None)


def _triton_requirement() -> str:
    """The requirement of the installed torch, such as triton==3.7.1; else any Triton."""
    for line in metadata.requires("torch") or []:
        match = re.match(r"((?:pytorch-)?triton)(?![\w.-])\s*\(?\s*([^;)]*)", line)
        if match:
            return match[1] + match[2].strip()
    return "triton"
