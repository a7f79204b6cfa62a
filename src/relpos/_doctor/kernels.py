"""What relpos has compiled: the CPU kernel, whether it loads here, and what it uses of the processor.

And what it compiles when it is first used: the GPU kernels, and whether Triton can do that here.
"""

import os
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from relpos._doctor.check import Complain, Finding, Probe
from relpos.backends import cpu, triton

_SETS = ("avx512", "avx2", "baseline")
# the compute capability that the GPU kernels need
_OLDEST = (triton.OLDEST_CAPABILITY, 0)


def compiled_probes() -> dict[str, Probe]:
    """A probe for each part of relpos that is compiled."""
    return {"CPU kernel": _cpu_kernel, "GPU kernels": _gpu_kernels}


def _cpu_kernel(complain: Complain) -> Finding:
    is_built, limit = cpu.LIBRARY.exists(), os.environ.get("RELPOS_CPU") or None
    is_unknown = limit is not None and limit not in _SETS
    value = {
        "path": str(cpu.LIBRARY),
        "built": is_built,
        "loads": cpu.UNAVAILABLE is None,
        "reason": cpu.UNAVAILABLE,
        "instructions": None if is_unknown else cpu.instruction_set(),
        "limit": limit,
    }
    if is_unknown:
        complain(
            f"RELPOS_CPU must be one of {', '.join(_SETS)}; it is {limit!r}, which the kernel refuses.",
            "Unset RELPOS_CPU.",
        )
    if cpu.UNAVAILABLE is None and is_unknown:
        return Finding(value, f"loads, and refuses to run, RELPOS_CPU={limit}\nfrom {cpu.LIBRARY}")
    if cpu.UNAVAILABLE is None:
        source = "" if limit is None else f", RELPOS_CPU={limit}"
        return Finding(value, f"loads, with instructions {value['instructions']}{source}\nfrom {cpu.LIBRARY}")
    if not is_built and sys.platform == "win32":
        return Finding(value, "none for Windows")
    state = "does not load" if is_built else "is missing"
    complain(f"the CPU kernel {state}: attention on the CPU is slower.", _advice())
    where = "from" if is_built else "looked for at"
    return Finding(value, f"{cpu.UNAVAILABLE}\n{where} {cpu.LIBRARY}")


def _advice() -> str:
    if os.environ.get("RELPOS_CPU_KERNEL"):
        return "Unset RELPOS_CPU_KERNEL, or have it name a kernel that was built for this torch and machine."
    sources = Path(__file__).parents[3]
    if (sources / "setup.py").exists():
        return (
            f"Have g++ or clang++, then run `pip install -v --no-deps -e {sources}`; "
            "its output says what is wrong if it still builds none."
        )
    return (
        "Have g++ or clang++, then run `pip install -v --no-deps PATH` with the path of relpos's sources, or "
        "of a wheel that was built for this system; its output says what is wrong if it still builds none."
    )


def _gpu_kernels(complain: Complain) -> Finding:
    version, is_there = _triton_version(), find_spec("triton") is not None
    name, reason = f"Triton {version}" if version else "Triton", triton.UNAVAILABLE
    value: dict[str, Any] = {
        "available": reason is None,
        "reason": reason,
        "triton": version,
        "interpreted": triton.IS_INTERPRETED,
        "devices": [],
    }
    if triton.IS_INTERPRETED:
        complain(
            "TRITON_INTERPRET is set: GPU kernels run on no GPU but on the CPU, very slowly.",
            "Unset TRITON_INTERPRET; it is for tests.",
        )
    elif torch.version.cuda is None:
        note = f"{name} is installed" if is_there else "Triton is not installed; GPUs alone use it"
        return Finding(value, f"none: {reason}\n{note}")
    if reason is not None and reason.startswith(triton.NO_LAUNCH):
        if _served_devices(complain):
            _judge_compiler(complain)
        return Finding(value, f"none: {reason}")
    if reason is not None:
        # the backend has one reason for both, and what helps differs
        state = f"{name} does not import" if is_there else "Triton is not installed"
        complain(
            f"{state}: the GPU kernels cannot be compiled, and attention on GPUs is slower.",
            f'pip install {"--force-reinstall " if is_there else ""}"{_triton_wanted()}"',
        )
        return Finding(value, f"none: {reason}")
    if triton.IS_INTERPRETED:
        return Finding(value, f"interpreted on the CPU by {name}")
    devices = _served_devices(complain)
    served = [f"for {device['name']}, compute capability {device['capability']}" for device in devices]
    lines = [f"compiled by {name} when they are first used", *(served or ["no GPU here that they are for"])]
    return Finding(value | {"devices": devices}, "\n".join(lines))


def _served_devices(complain: Complain) -> list[dict[str, str]]:
    """The GPUs that are new enough, each kind once."""
    served = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        capability = f"{properties.major}.{properties.minor}"
        if (properties.major, properties.minor) >= _OLDEST:
            served[properties.name] = {"name": properties.name, "capability": capability}
        else:
            complain(
                f"the GPU kernels need compute capability {_OLDEST[0]}.{_OLDEST[1]} or more; "
                f"{properties.name} has {capability}.",
                "Use a newer GPU, or on this one another backend.",
            )
    return list(served.values())


def _judge_compiler(complain: Complain) -> None:
    """Triton launches kernels by a module in C, which it builds on each machine once."""
    for missing in triton.missing_to_launch():
        is_compiler = missing.startswith("a C compiler")
        complain(
            f"Triton needs {missing}.",
            "Install gcc or clang, or have CC name a C compiler."
            if is_compiler
            else "Install them: the package is python3-dev or python3-devel on most systems.",
        )


def _triton_version() -> str | None:
    """As its metadata or, where it has none, the module says; Triton is not imported for it."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get("triton"), "__version__", None)


def _triton_wanted() -> str:
    """What pip is to install: the Triton that this torch names, if it names one."""
    for line in metadata.requires("torch") or []:
        match = re.match(r"((?:pytorch-)?triton)(?![\w.-])\s*\(?\s*([^;)]*)", line)
        if match:
            return match[1] + match[2].strip()
    return "triton"
