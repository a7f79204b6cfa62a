"""The kernel as part of the package: how it is compiled, what wheels hold, installs without a compiler.

Most builds here have a stand-in for the compiler, which logs how it was called and copies a finished kernel.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import setuptools

from relpos.backends.cpu import backend as cpu

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "src" / "relpos" / "csrc"
KERNEL = "relpos/_cpu_kernel.so"
IS_X86 = os.uname().machine == "x86_64"

Build = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a distribution is built from, without a kernel."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("*.so*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    return tree


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """What is called like a compiler, adds its arguments to compiler.log and makes what it should."""
    made = cpu.LIBRARY
    if not made.exists():
        made = tmp_path / "made"
        made.write_bytes(b"\x7fELF, with the name cpu_version")
    path = tmp_path / "compiler"
    path.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/compiler.log"\n'
        f'while [ "$1" != -o ]; do shift; done\nsleep 0.01\ncp "{made}" "$2"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def build(tree: Path, tmp_path: Path, compiler: Path) -> Build:
    """Run a hook of the build backend as pip does, with changes to the environment; None removes a name."""

    def call(hook: str = "build_wheel", **changes: str | None) -> subprocess.CompletedProcess[str]:
        environment: dict[str, str | None] = {**os.environ, "CXX": str(compiler), "RELPOS_BUILD_KERNEL": None}
        environment |= {"CXXFLAGS": None, **changes}
        code = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tree,
            env={name: value for name, value in environment.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def _wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _contents(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_has_the_kernel_and_each_instruction_set_is_compiled_once(build: Build, tmp_path: Path) -> None:
    done = build(CXXFLAGS="-O1 -g")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"relpos-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", _wheel(tmp_path).name)
    names = _contents(_wheel(tmp_path))
    assert {KERNEL, "_relpos_command.py", "relpos/recipes/experiments/demo.yaml"} <= {*names}
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o"))]
    calls = (tmp_path / "compiler.log").read_text().splitlines()
    sets = sorted(re.findall(r"-DRELPOS_ISA=(\w+)", "\n".join(calls)))
    assert sets == (["avx2", "avx512", "baseline"] if IS_X86 else ["baseline"])
    (baseline,) = [call for call in calls if "=baseline" in call]
    assert "-mavx" not in baseline
    # none is this machine's
    assert not [call for call in calls if "-march" in call or "-ffast-math" in call or "-rpath" in call]
    (operators,) = [call for call in calls if " -c src/relpos/csrc/operators.cpp" in call]
    # nothing newer than torch 2.10
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in operators
    assert calls[-1].count(".o ") == len(calls) - 1
    # flags of the environment come last
    assert all(call.index("-O3") < call.index("-O1 -g") for call in calls)


def test_wheel_works_away_from_the_repository(build: Build, tmp_path: Path) -> None:
    assert build().returncode == 0
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(_wheel(tmp_path)).extractall(site)
    names = "cpu.__file__, cpu.LIBRARY, cpu.UNAVAILABLE"
    code = f"import relpos.backends.cpu.backend as cpu; print({names}, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site), "RELPOS_CPU_KERNEL": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    file, library, unavailable = done.stdout.splitlines()
    assert file == str(site / "relpos/backends/cpu/backend.py")
    assert library == str(site / KERNEL)
    # as well as the kernel that was copied
    assert (unavailable == "None") is (cpu.UNAVAILABLE is None)


def test_kernel_in_place_is_replaced_and_not_written_over(build: Build, tree: Path) -> None:
    old = tree / "src" / KERNEL
    old.write_text("mapped by a process")
    kept = tree / "kept"
    os.link(old, kept)
    assert build("build_editable").returncode == 0
    assert old.stat().st_size != kept.stat().st_size
    assert kept.read_text() == "mapped by a process"
    assert [path.name for path in old.parent.glob("*.so*")] == [old.name]


def test_code_for_one_instruction_set_is_used_by_no_other(tmp_path: Path) -> None:
    tools = [shutil.which(name) for name in ("c++", "nm")]
    if None in tools:
        pytest.skip("no compiler")
    # less is inlined than in a build for use, so that what could be shared is seen
    flags = ["-std=c++17", "-O1", "-fPIC", "-DRELPOS_ISA=baseline"]
    output = tmp_path / "kernel.o"
    command = [tools[0], *flags, "-c", str(CSRC / "kernel.cpp"), "-o", str(output)]
    subprocess.run(command, check=True, timeout=300)
    listed = subprocess.run([tools[1], "-C", str(output)], check=True, timeout=60, capture_output=True)
    weak = re.findall(r"^\S+ [WVu] (.*)", listed.stdout.decode(), re.MULTILINE)
    assert weak
    # two objects have such a symbol, and the linker keeps either
    assert [name for name in weak if "relpos::baseline::" not in name] == []


# without a compiler, and where compiling fails

WITHOUT = "relpos: attention on the CPU works without it, more slowly.\n"


@pytest.mark.parametrize(
    ("change", "hook", "reason"),
    [
        ({"CXX": " ", "PATH": "/nowhere"}, "build_wheel", r"no C\+\+ compiler was found; .* CXX"),
        ({"CXX": "/nowhere/c++"}, "build_editable", r"/nowhere/c\+\+ does not run .* CXX .*"),
        ({"CXX": "false"}, "build_wheel", r"false failed, .* C\+\+17"),
        ({"CXX": "c++ 'x"}, "build_wheel", "CXX cannot be read .*"),
        ({"RELPOS_BUILD_KERNEL": "0"}, "build_editable", "left out, as RELPOS_BUILD_KERNEL=0 says"),
    ],
)
def test_without_a_kernel_the_package_is_pure_and_the_reason_is_told(
    build: Build, tmp_path: Path, tree: Path, change: dict[str, str | None], reason: str, hook: str
) -> None:
    # from an earlier build of other sources
    stale = tree / "src" / KERNEL
    stale.write_text("stale")
    done = build(hook, **change)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"relpos: the CPU kernel was not built: {reason}\.\n{WITHOUT}", done.stderr)
    assert _wheel(tmp_path).name.endswith("-py3-none-any.whl")
    assert KERNEL not in _contents(_wheel(tmp_path))
    assert stale.exists() is (hook == "build_wheel")


def test_without_torch_the_package_is_pure_and_the_reason_is_told(
    build: Build, tmp_path: Path, tree: Path
) -> None:
    (tree / "torch.py").touch()
    # an older torch has no such headers
    done = build(PYTHONPATH=str(tree))
    assert done.returncode == 0, done.stderr
    assert f"not built: torch must be 2.10 or newer, with its headers.\n{WITHOUT}" in done.stderr
    assert _wheel(tmp_path).name.endswith("-py3-none-any.whl")


# what pip's isolated builds have: setuptools, and the environment's own folder out of the path
ISOLATED = "import sys; sys.path = [{site!r}, *(x for x in sys.path if 'site-packages' not in x)]"


@pytest.mark.parametrize("has_torch", [True, False])
def test_isolated_build_uses_torch_of_its_environment_or_says_that_there_is_none(
    tree: Path, compiler: Path, tmp_path: Path, has_torch: bool
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("setuptools", "_distutils_hack", f"setuptools-{setuptools.__version__}.dist-info"):
        (site / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    hidden = "" if has_torch else "sys.executable = 'false'\n"
    code = (
        f"{ISOLATED.format(site=str(site))}\n{hidden}"
        f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "CXX": str(compiler), "RELPOS_BUILD_KERNEL": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = (
        "torch is not here; install it and setuptools 77.0.3 or newer, then relpos with --no-build-isolation"
    )
    assert (f"not built: {told}.\n{WITHOUT}" in done.stderr) is not has_torch
    assert (KERNEL in _contents(_wheel(tmp_path))) is has_torch


def test_a_wish_that_is_none_is_refused(build: Build) -> None:
    done = build(RELPOS_BUILD_KERNEL="yes")
    assert done.returncode == 1
    assert "relpos: RELPOS_BUILD_KERNEL must be 0 or 1; got 'yes'. Unset it to try." in done.stderr


@pytest.mark.parametrize(
    "writes",
    [
        "",
        "head -c 5000 /dev/urandom > $2",
        "(printf '\\177ELF'; head -c 5000 /dev/urandom) > $2",
    ],
)
def test_a_compiler_that_writes_no_library_is_told_and_leaves_no_kernel(
    build: Build, compiler: Path, tmp_path: Path, tree: Path, writes: str
) -> None:
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{writes}\n')
    reason = f"{compiler} ended well and wrote no library; it must be gcc or clang with C++17"
    done = build("build_editable")
    assert done.returncode == 0, done.stderr
    assert f"relpos: the CPU kernel was not built: {reason}.\n{WITHOUT}" in done.stderr
    assert "Traceback" not in done.stderr
    assert KERNEL not in _contents(_wheel(tmp_path))
    assert not list((tree / "src").rglob("*.so*"))


def test_kernel_that_is_required_and_cannot_be_built_is_an_error(build: Build, tmp_path: Path) -> None:
    done = build(CXX="false", RELPOS_BUILD_KERNEL="1")
    assert done.returncode == 1
    assert "relpos: the CPU kernel cannot be built: false " in done.stderr
    assert not list(tmp_path.glob("*.whl"))
