"""What relpos has compiled: the CPU kernel, whether it loads here, and what it uses of the processor."""

import os
import sys
from pathlib import Path

from relpos._doctor.finding import Complain, Finding, Probe
from relpos.backends import cpu

_SETS = ("avx512", "avx2", "baseline")


def compiled_probes() -> dict[str, Probe]:
    """A probe for each part of relpos that is compiled."""
    return {"CPU kernel": _cpu_kernel}


def _cpu_kernel(complain: Complain) -> Finding:
    is_built, limit = cpu.LIBRARY.exists(), os.environ.get("RELPOS_CPU") or None
    value = {
        "path": str(cpu.LIBRARY),
        "built": is_built,
        "loads": cpu.UNAVAILABLE is None,
        "reason": cpu.UNAVAILABLE,
        "instructions": cpu.instruction_set(),
        "limit": limit,
    }
    if limit is not None and limit not in _SETS:
        complain(
            f"RELPOS_CPU must be one of {', '.join(_SETS)}; it is {limit!r}, which the kernel ignores.",
            "Unset RELPOS_CPU.",
        )
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
