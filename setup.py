"""Builds the CPU kernel of src/relpos/csrc where a C++ compiler and torch are at hand.

relpos works without it. RELPOS_BUILD_KERNEL=1 makes it an error when the kernel cannot be built, 0 leaves it
out; CXX names the compiler, CXXFLAGS adds to its flags (docs/cpu_kernel.md).
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "_cpu_kernel.so"
SOURCES = Path("src/relpos/csrc")
# no -march: which of these runs is chosen when it runs
INSTRUCTION_SETS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTION_SETS["avx512"] = [f"-mavx512{part}" for part in ("f", "dq", "bw", "vl")] + ["-mavx2", "-mfma"]
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
    # sums may be fused multiply-adds, on every compiler alike; nothing else is loosened
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
]
# how a shared library begins on Linux and on macOS, and a name that ours holds
LIBRARY_MARKS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
KERNEL_NAME = b"cpu_version"
# the oldest torch whose stable ABI the kernel asks for: 2.10
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"


class NotBuiltError(Exception):
    """Why there is no kernel, and what to do."""


class BuildKernel(build_ext):
    """Compiles all files at once into a library, which torch loads and Python does not import."""

    def get_ext_filename(self, fullname: str) -> str:
        """Its name holds no version of Python, since it uses nothing of Python."""
        return str(Path("relpos", LIBRARY))

    def run(self) -> None:
        """Build the kernel, or say why not."""
        folder = "src/relpos" if self.inplace else Path(self.build_lib, "relpos")
        target, wanted = Path(folder, LIBRARY), os.environ.get("RELPOS_BUILD_KERNEL", "")
        if wanted not in ("", "0", "1"):
            sys.exit(f"relpos: RELPOS_BUILD_KERNEL must be 0 or 1; got {wanted!r}. Unset it to try.")
        try:
            if wanted == "0":
                raise NotBuiltError("left out, as RELPOS_BUILD_KERNEL=0 says")
            self._build(target)
        except NotBuiltError as reason:
            # one from an earlier build would go with other sources
            target.unlink(missing_ok=True)
            if wanted == "1":
                sys.exit(f"relpos: the CPU kernel cannot be built: {reason}.")
            print(f"relpos: the CPU kernel was not built: {reason}.", file=sys.stderr)
            print("relpos: attention on the CPU works without it, more slowly.", file=sys.stderr, flush=True)

    def _build(self, target: Path) -> None:
        compiler, torch = _compiler(), _torch()
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, *_words("CXXFLAGS")]
        steps = {
            objects / f"kernel_{name}.o": ["kernel.cpp", f"-DRELPOS_ISA={name}", *extra]
            for name, extra in INSTRUCTION_SETS.items()
        }
        include = ["-isystem", str(torch / "include")]
        steps[objects / "operators.o"] = ["operators.cpp", TORCH_TARGET, *include]
        steps[objects / "scratch.o"] = ["scratch.cpp"]
        commands = [
            [*compiler, *flags, *options, "-c", str(SOURCES / source), "-o", str(output)]
            for output, (source, *options) in steps.items()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_call, commands))
        if sys.platform == "darwin":
            link = ["-dynamiclib", "-undefined", "dynamic_lookup"]
        else:
            # no path to it: it is in the process when torch loads the kernel
            link = ["-shared", f"-L{torch / 'lib'}", "-ltorch_cpu"]
        # beside it and then over it: a process that runs keeps the one that it has
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            _call([*compiler, *flags, *map(str, steps), *link, "-o", str(unfinished)])
            if not _is_kernel(unfinished):
                raise NotBuiltError(
                    f"{compiler[0]} ended well and wrote no library; it must be gcc or clang with C++17"
                )
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python, and for one platform if the kernel is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM, or py3-none-any without a kernel."""
        self.root_is_pure = not Path(self.bdist_dir, "relpos", LIBRARY).exists()
        platform_name = super().get_tag()[2]
        # one half of what a universal Python runs on
        return "py3", "none", platform_name.replace("universal2", platform.machine())


def _compiler() -> list[str]:
    if os.name == "nt":
        raise NotBuiltError("it needs gcc or clang, on Linux or macOS")
    if named := _words("CXX"):
        return named
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise NotBuiltError("no C++ compiler was found; install g++ or clang++, or name one by CXX")
    return [found]


def _words(name: str) -> list[str]:
    """What the environment holds under `name`, as a shell would part it."""
    try:
        return shlex.split(os.environ.get(name, ""))
    except ValueError as error:
        raise NotBuiltError(f"{name} cannot be read ({error}); mend its quotes") from error


def _is_kernel(library: Path) -> bool:
    content = library.read_bytes() if library.is_file() else b""
    return content.startswith(LIBRARY_MARKS) and KERNEL_NAME in content


def _torch() -> Path:
    """The folder of torch, which is not imported."""
    # pip's isolated builds hide what is installed, but run the Python of the environment that they build for
    command = [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep='\\n')"]
    places = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    spec = PathFinder.find_spec("torch", [*sys.path, *places])
    if spec is None or spec.origin is None:
        raise NotBuiltError(
            "torch is not here; install it and setuptools 77.0.3 or newer, "
            "then relpos with --no-build-isolation"
        )
    folder = Path(spec.origin).parent
    if not (folder / "include/torch/headeronly/version.h").exists():
        raise NotBuiltError("torch must be 2.10 or newer, with its headers")
    return folder


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except OSError as error:
        raise NotBuiltError(
            f"{command[0]} does not run ({error.strerror}); set CXX to a C++ compiler"
        ) from error
    except subprocess.CalledProcessError as error:
        raise NotBuiltError(f"{command[0]} failed, see above; it must be gcc or clang with C++17") from error


if sys.platform == "darwin":
    # as old a system as this Python serves, and as the wheel's name says
    oldest = sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET") or "11.0"
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", oldest)
sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
headers = sorted(str(path) for path in SOURCES.glob("*.h"))
setup(
    ext_modules=[Extension("relpos._cpu_kernel", sources, depends=headers)],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
