"""The command `relpos` from outside the package: OpenMP is told how to wait before torch loads it.

GNU's OpenMP, which torch has on Linux, reads its variables when it is loaded, and `import relpos` loads it.
Its threads spin while they wait, 300,000 turns unless told otherwise: on a busy machine that is time which
the thread that they wait for does not get. What the user has set stays; the library changes no setting.
"""

import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# turns before a waiting thread sleeps: as fast as the default on a quiet machine (docs/machines.md)
SPIN_COUNT = 10_000
# says which variables were chosen here, so that `relpos doctor` can tell them from those of the user
CHOSEN = "RELPOS_CHOSEN"

# each of these says how threads wait, in one OpenMP or another
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC")


def main() -> None:
    """Run the command and exit; what the script `relpos` calls."""
    os.environ.update(choose(os.environ))
    _command()


def main_of_module() -> None:
    """Run the command and exit; what `python -m relpos` calls, with torch already loaded.

    The process begins anew with the same id, since what was loaded reads no variable again.
    """
    chosen = choose(os.environ)
    if "torch" not in sys.modules:
        os.environ.update(chosen)
    elif chosen and _may_begin_anew():
        # where that fails the command runs all the same, and waits as it always would
        with suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **chosen})
    _command()


def choose(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environment`; none where the user has decided, or was served before."""
    if sys.platform != "linux" or CHOSEN in environment:
        return {}
    chosen = {}
    if not any(name in environment for name in WAITING):
        chosen["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    quota = cpu_quota()
    # affinity alone is heeded by OpenMP itself
    if quota is not None and quota < num_cores() and not any(name in environment for name in THREADS):
        chosen["OMP_NUM_THREADS"] = str(max(1, math.ceil(quota)))
    return {**chosen, CHOSEN: ",".join(chosen)} if chosen else {}


def num_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that this process may run on; hyperthreads of one core count once where the system tells."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        cores.add(_text(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu))
    return len(cores)


def cpu_quota(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """CPUs' worth of time that control groups leave this process, the least of them; None without a limit."""
    quotas = []
    for line in _text(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [mounted / controllers, mounted / "cpu"] if controllers else [mounted, mounted / "unified"]
        names = [name for name in group.split("/") if name not in ("", "..")]
        # a container sees its own group at the root, under whatever name it has outside
        for root in roots:
            for depth in range(len(names) + 1):
                quotas.append(_quota(root.joinpath(*names[:depth])))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    second = _text(group / "cpu.max").split()
    first = [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = map(int, second or first)
    except ValueError:
        # "max" in the second version, no such file in either
        return None
    return quota / period if quota > 0 and period > 0 else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _may_begin_anew() -> bool:
    """Whether this process is `python -m relpos` and nothing else, which may be run again from its start."""
    arguments = sys.argv[1:]
    ends = (["-m", "relpos", *arguments], ["-mrelpos", *arguments])
    return bool(sys.executable) and any(sys.orig_argv[-len(end) :] == end for end in ends)


def _command() -> None:
    try:
        from relpos.cli import main as run
    except KeyboardInterrupt:
        # loading torch takes a second or two
        print("relpos: stopped.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run()
