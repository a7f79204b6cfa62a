"""How OpenMP's threads wait, and whether the machine is too busy for threads that spin."""

import os
import re
from pathlib import Path

from _relpos_command import CHOSEN, SPIN_COUNT, WAITING, num_cores
from relpos._doctor.check import Result, Warn

_MAPS = Path("/proc/self/maps")
# runnable tasks per core from which on a spinning thread takes a core from other work
_BUSY = 1.5


def check_waiting(warn: Warn) -> Result:
    """The OpenMP library that is loaded, its settings, and the machine's load."""
    library, load = _library(), _tasks_per_core()
    settings = {name: os.environ[name] for name in WAITING if name in os.environ}
    chosen = [name for name in settings if name in os.environ.get(CHOSEN, "").split(",")]
    source = ", ".join(
        f"{name}={setting}{', set by this command' if name in chosen else ''}"
        for name, setting in settings.items()
    )
    lines = [f"{library or 'unknown OpenMP library'}: {source or 'default settings'}"]
    if library == "libgomp":
        is_long = _spins_long(settings)
        how = "spin for long: slow beside other work" if is_long else "soon sleep"
        lines.append(f"waiting threads {how}")
        if "GOMP_SPINCOUNT" in chosen:
            lines.append("set GOMP_SPINCOUNT in your own programs too: by default they spin 300,000 turns")
        if is_long and load is not None and load > _BUSY:
            unset = f"Unset {' and '.join(settings)}, so that the commands choose; in" if settings else "In"
            warn(
                f"The machine is busy ({load:.1f} tasks per core), and waiting threads spin for long.",
                f"{unset} your own programs set GOMP_SPINCOUNT={SPIN_COUNT} before you import torch.",
            )
    value = {"library": library, **settings, "chosen": chosen, "tasks_per_core": load}
    return Result(value, "\n".join(lines))


def _spins_long(settings: dict[str, str]) -> bool:
    """Whether libgomp's threads spin longer than the commands let them."""
    count = settings.get("GOMP_SPINCOUNT", "").strip().lower()
    if count.isascii() and count.isdigit():
        return int(count) > SPIN_COUNT
    return count in ("infinite", "infinity") or settings.get("OMP_WAIT_POLICY", "").lower() != "passive"


def _library() -> str | None:
    """The OpenMP library in this process; None where the system has no /proc."""
    try:
        found = re.findall(r"/(libgomp|libiomp5|libomp)\b", _MAPS.read_text(errors="replace"))
    except OSError:
        return None
    return next(iter(found), None)


def _tasks_per_core() -> float | None:
    """The load of the last minute; None where the system has no such number."""
    return os.getloadavg()[0] / num_cores() if hasattr(os, "getloadavg") else None
