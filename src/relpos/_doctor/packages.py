"""Versions of relpos, Python and torch, and the packages of each extra in relpos's metadata."""

import platform
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from relpos._doctor.check import NO_BREAK, Check, Result, Warn


class _Requirement(NamedTuple):
    """A requirement in the metadata, such as `relpos[plots]<2,>=1; extra == "demo"`."""

    name: str
    extras: list[str]
    bounds: str
    extra: str  # "" for a package that relpos always needs


def version_checks() -> dict[str, Check]:
    """The checks of relpos, Python and torch."""
    return {"relpos": _relpos, "python": _python, "torch": _torch}


def package_checks() -> dict[str, Check]:
    """A check of the packages that relpos always needs, and one of each extra."""
    extras = metadata.metadata("relpos").get_all("Provides-Extra") or []
    return {"always": partial(_packages, ""), **{extra: partial(_packages, extra) for extra in extras}}


def _relpos(warn: Warn) -> Result:
    value = {"version": metadata.version("relpos"), "path": str(Path(__file__).parents[1])}
    return Result(value, f"{value['version']}\nfrom {value['path']}")


def _python(warn: Warn) -> Result:
    value = {
        "version": platform.python_version(),
        "path": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
    }
    return Result(value, f"{value['version']} on {value['system']}\nfrom {value['path']}")


def _torch(warn: Warn) -> Result:
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    else:
        build = "CPU"
    value = {"version": str(torch.__version__), "build": build, "path": str(Path(torch.__file__).parent)}
    return Result(value, f"{value['version']}, built for {build}\nfrom {value['path']}")


def _packages(extra: str, warn: Warn) -> Result:
    """The installed and the missing packages of `extra`, and the command that installs the latter."""
    install = f'pip install "relpos[{extra}]"' if extra else "pip install relpos"
    requirements = [line for line in _requirements() if line.extra == extra]
    includes = [name for line in requirements if line.name == "relpos" for name in line.extras]
    packages = {
        line.name: {"wanted": line.bounds, "version": _version(line.name)}
        for line in requirements
        if line.name != "relpos"
    }
    for name, entry in packages.items():
        version, bounds = entry["version"], entry["wanted"]
        if version is not None and not fits(version, bounds or ""):
            warn(
                f"{name} must be {bounds}; got {version}.", install.replace("install", "install --upgrade", 1)
            )
    present = [f"{name}{NO_BREAK}{entry['version']}" for name, entry in packages.items() if entry["version"]]
    missing = [name for name, entry in packages.items() if not entry["version"]]
    lines = [", ".join([f"those of {name}" for name in includes] + present)]
    if missing:
        lines += [f"missing: {', '.join(missing)}", install]
    value = {"packages": packages, "includes": includes, "missing": missing, "install": install}
    return Result(value, "\n".join(line for line in lines if line))


def _requirements() -> list[_Requirement]:
    found = []
    for line in metadata.requires("relpos") or []:
        match = re.match(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?([^;]*)", line)
        assert match is not None, line
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", line)
        extras = [name.strip() for name in (match[2] or "").split(",") if name.strip()]
        found.append(_Requirement(match[1], extras, match[3].strip(" ()"), extra[1] if extra else ""))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fits(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=2.10,<3`; others (`==2.*`, `~=2.1`) are ignored."""
    installed = TorchVersion(version)
    for clause in bounds.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*(.+?)\s*", clause)
        if match and (installed >= match[2]) != (match[1] == ">="):
            return False
    return True
