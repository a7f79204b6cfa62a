"""The suites: where their tests come from, and a run of one of them on one side.

transformers' tests of models are in its source distribution, its tests of generation in its repository alone;
torch's tests are in its repository alone. All are unpacked or read outside the project's own files.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import transformers
from counting import Records

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "peers"
GENERATION = "tests/generation/test_utils.py"
# what of transformers' tests is not in its source distribution
STUBS = {
    "tests/__init__.py": "",
    "tests/generation/__init__.py": "",
    GENERATION: "class GenerationTesterMixin:\n    pass\n",
    "tests/exporters/__init__.py": "",
    # the tests of exporters for other runtimes are left out: docs/export.md and our own tests hold export
    "tests/exporters/test_export.py": (
        "class ExportTesterMixin:\n    pass\n\n\nclass ExportGenerateTesterMixin:\n    pass\n"
    ),
}
SETTINGS = """[pytest]
enable_assertion_pass_hook = true
python_classes = Test*
"""


@dataclass(frozen=True)
class Suite:
    """Tests that run on several sides; the first side is that of the library the tests are from."""

    name: str
    sides: tuple[str, ...]
    file: Path
    path: Path
    plugins: tuple[str, ...] = ()
    # pytest's -k
    selection: str = ""


def transformers_suites(checkout: Path | None) -> list[Suite]:
    """transformers' tests of models, and with a checkout of its repository those of generation."""
    folder = BUILD / "transformers"
    unpack(download(), folder)
    for name, text in STUBS.items():
        write(folder / name, text)
    if checkout is not None:
        write(folder / GENERATION, read(checkout / GENERATION))
    sides = ("marian", "relpos", "relpos-no-distances")
    return [Suite("transformers: models", sides, HERE / "translation_models.py", folder)]


def torch_suites(checkout: Path) -> list[Suite]:
    """torch's tests of multi-head attention, and of encoders and decoders."""
    sides = ("torch", "relpos-no-distances", "relpos-distances")
    # pytest runs in another folder
    checkout = checkout.resolve()
    attention = checkout / "test/nn/test_multihead_attention.py"
    layers = checkout / "test/test_transformers.py"
    # its other tests are of attention as a function
    chosen = "TestTransformers and not scaled_dot_product"
    read(attention), read(layers)
    return [
        Suite("torch: attention", sides, attention, attention.parent, ("torch_modules",)),
        Suite("torch: layers", sides, layers, layers.parent, ("torch_modules",), chosen),
    ]


def download() -> Path:
    """The source distribution of the installed transformers, from pip's index."""
    version = transformers.__version__
    path = BUILD / f"transformers-{version}.tar.gz"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        options = [
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--dest",
            str(BUILD),
        ]
        command = [sys.executable, "-m", "pip", "download", *options, f"transformers=={version}"]
        subprocess.run(command, check=True)
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Write the archive's folder `tests` into `folder`."""
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition("/")[2]
            if name.startswith("tests/") and member.isfile():
                stream = files.extractfile(member)
                assert stream is not None
                write(folder / name, stream.read().decode())


def read(path: Path) -> str:
    """The text of a file of a checkout; what is missing is said in one sentence."""
    if not path.is_file():
        raise SystemExit(
            f"the checkout must have {path.name}; there is no {path}. Give the repository's root."
        )
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(suite: Suite, side: str) -> Records:
    """What each test did on this side, by its name; see `observing`. They run in a process of their own."""
    label = re.sub(r"\W+", "-", f"{suite.name} {side}")
    out = BUILD / f"{label}.jsonl"
    write(BUILD / "pytest.ini", SETTINGS)
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PEERS_SIDE": side,
        "PEERS_OUT": str(out),
        "PYTHONPATH": os.pathsep.join([str(suite.path), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        # options of our own tests are not theirs
        "PYTEST_ADDOPTS": "",
        "HF_HUB_OFFLINE": "1",
    }
    plugins = [part for name in ("observing", *suite.plugins) for part in ("-p", name)]
    options = ["-q", "--noconftest", "-c", str(BUILD / "pytest.ini"), "-p", "no:cacheprovider", "--tb=short"]
    selection = ["-k", suite.selection] if suite.selection else []
    command = [sys.executable, "-m", "pytest", *options, *plugins, *selection, str(suite.file)]
    with (BUILD / f"{label}.log").open("w") as log:
        subprocess.run(command, env=environment, cwd=BUILD, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not out.exists():
        raise SystemExit(f"the tests of {suite.name} did not run on {side}; see {BUILD / label}.log.")
    return {record.pop("test"): record for record in map(json.loads, out.read_text().splitlines())}
