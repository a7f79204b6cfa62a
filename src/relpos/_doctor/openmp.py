"""How the threads of OpenMP wait, who has chosen it, and whether the machine is too busy for that."""

import os
import re
from pathlib import Path

from _relpos_command import CHOSEN, SPIN_COUNT
from relpos._doctor.check import Complain, Finding, Probe
from relpos._doctor.machine import num_cores

_NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY")
_MAPS = Path("/proc/self/maps")
# tasks that want to run, for each core: from here on a thread that spins takes the core from others
_BUSY = 1.5


def waiting_probes() -> dict[str, Probe]:
    """A probe for waiting, and one for what else wants to run."""
    return {"waiting": _waiting, "load": _load}


def _waiting(complain: Complain) -> Finding:
    library = _library()
    settings = {name: os.environ[name] for name in _NAMES if name in os.environ}
    chosen = [name for name in settings if name in os.environ.get(CHOSEN, "").split(",")]
    told = ", ".join(
        f"{name}={setting}{', chosen by this command' if name in chosen else ''}"
        for name, setting in settings.items()
    )
    lines = [f"{library or 'an OpenMP that is not known'}: {told or 'its default'}"]
    if library == "libgomp":
        lines.append(_spinning(settings))
        load = _tasks_per_core()
        if load is not None and load > _BUSY and _spins_long(settings):
            unset = " and ".join(settings)
            complain(
                f"the machine is busy ({load:.1f} tasks a core), and threads that wait spin for long.",
                f"{f'Unset {unset}: the commands choose then; in' if unset else 'In'} programs of "
                f"your own set GOMP_SPINCOUNT={SPIN_COUNT} before torch is imported.",
            )
        if "GOMP_SPINCOUNT" in chosen:
            lines.append("programs of your own spin 300,000 turns unless GOMP_SPINCOUNT is set for them too")
    return Finding({"library": library, **settings, "chosen": chosen}, "\n".join(lines))


def _spinning(settings: dict[str, str]) -> str:
    return (
        "threads that wait spin for long: fast alone, slow beside other work"
        if _spins_long(settings)
        else "threads that wait soon sleep: as fast alone, and faster beside other work"
    )


def _spins_long(settings: dict[str, str]) -> bool:
    """Whether libgomp's threads spin for longer than the commands have them do."""
    count = settings.get("GOMP_SPINCOUNT", "").strip().lower()
    if count.isascii() and count.isdigit():
        return int(count) > SPIN_COUNT
    return count in ("infinite", "infinity") or settings.get("OMP_WAIT_POLICY", "").lower() != "passive"


def _library() -> str | None:
    """The OpenMP that this process has loaded; None where the system does not tell."""
    try:
        found = re.findall(r"/(libgomp|libiomp5|libomp)\b", _MAPS.read_text(errors="replace"))
    except OSError:
        return None
    return next(iter(found), None)


def _load(complain: Complain) -> Finding:
    load = _tasks_per_core()
    if load is None:
        return Finding({"tasks_per_core": None}, "not known on this system")
    return Finding({"tasks_per_core": round(load, 2)}, f"{load:.1f} tasks a core over the last minute")


def _tasks_per_core() -> float | None:
    if not hasattr(os, "getloadavg"):
        return None
    return os.getloadavg()[0] / num_cores()
