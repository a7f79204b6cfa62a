"""Versions of relpos, Python and torch, and the packages of each extra by the metadata of relpos."""

import operator
import platform
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from relpos._doctor.check import NO_BREAK, Complain, Finding, Probe

_ORDERS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class _Requirement(NamedTuple):
    """A line of the metadata, such as `relpos[plots]<2,>=1; extra == "demo"`."""

    name: str
    extras: list[str]
    wanted: str
    extra: str  # "" where it is always needed


def version_probes() -> dict[str, Probe]:
    """The probes for relpos, Python and torch."""
    return {"relpos": _relpos, "python": _python, "torch": _torch}


def package_probes() -> dict[str, Probe]:
    """A probe for what is always needed, and one for each extra."""
    extras = metadata.metadata("relpos").get_all("Provides-Extra") or []
    return {"always": partial(_packages, ""), **{extra: partial(_packages, extra) for extra in extras}}


def _relpos(complain: Complain) -> Finding:
    value = {"version": metadata.version("relpos"), "path": str(Path(__file__).parents[1])}
    return Finding(value, f"{value['version']}\nfrom {value['path']}")


def _python(complain: Complain) -> Finding:
    value = {
        "version": platform.python_version(),
        "path": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
    }
    return Finding(value, f"{value['version']} on {value['system']}\nfrom {value['path']}")


def _torch(complain: Complain) -> Finding:
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    else:
        build = "CPU"
    path, numpy = str(Path(torch.__file__).parent), _version("numpy")
    value = {"version": str(torch.__version__), "build": build, "path": path, "numpy": numpy}
    text = f"{value['version']}, built for {build}\nfrom {path}"
    if numpy is None:
        text += "\nNumPy is missing; torch warns of it once, and works: pip install numpy"
    return Finding(value, text)


def _packages(extra: str, complain: Complain) -> Finding:
    """What is there of the packages that `extra` brings, and how to get the rest."""
    install = f'pip install "relpos[{extra}]"' if extra else "pip install relpos"
    requirements = [found for found in _requirements() if found.extra == extra]
    includes = [name for found in requirements if found.name == "relpos" for name in found.extras]
    packages = {}
    for found in requirements:
        if found.name == "relpos":
            continue
        version = _version(found.name)
        packages[found.name] = {"wanted": found.wanted, "version": version}
        if version is not None and not fits(version, found.wanted):
            complain(
                f"{found.name} must be {found.wanted}; {version} is installed.",
                install.replace("install", "install --upgrade", 1),
            )
    present = [f"{name}{NO_BREAK}{entry['version']}" for name, entry in packages.items() if entry["version"]]
    missing = [name for name, entry in packages.items() if not entry["version"]]
    lines = [", ".join([f"those of {name}" for name in includes] + present)]
    if missing:
        lines += [f"missing: {', '.join(missing)}", install]
    value = {"packages": packages, "includes": includes, "missing": missing, "install": install}
    return Finding(value, "\n".join(line for line in lines if line))


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


def fits(version: str, wanted: str) -> bool:
    """Whether a version is within bounds such as `>=2.10,<3`, by its numbers alone.

    What is no bound (`==2.*`, `~=2.1`) is taken to hold: pip judges it, and this only warns.
    """
    for clause in wanted.split(","):
        match = re.fullmatch(r"\s*([<>]=?)\s*(.+?)\s*", clause)
        if match and not _ORDERS[match[1]](_release(version), _release(match[2])):
            return False
    return True


def _release(version: str) -> list[int]:
    """The numbers in front, without zeros at their end: [2, 10] for 2.10.0rc1."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
