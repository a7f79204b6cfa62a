"""The source distribution: it holds the whole project, and a wheel can be built from it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "examples", ".github", ".ci")
FILES = (
    *("setup.py", "pyproject.toml", "constraints.txt", "Makefile", "MANIFEST.in", "LICENSE"),
    *("CITATION.cff", ".pre-commit-config.yaml"),
)
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "*.pyc")


def build(hook: str, tree: Path, out: Path) -> None:
    """Call a hook of the build backend as pip does."""
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    environment = {**os.environ, "RELPOS_BUILD_KERNEL": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def files(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_source_distribution_holds_every_file_and_builds_a_wheel(tmp_path: Path) -> None:
    tree, out, unpacked = tmp_path / "tree", tmp_path / "out", tmp_path / "unpacked"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=MADE)
    for path in (*[ROOT / name for name in FILES], *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.py")):
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    written = files(tree)
    build("build_sdist", tree, out)
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    assert sorted(written - files(folder)) == []
    build("build_wheel", folder, out)
    (wheel,) = out.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "relpos/__init__.py",
        "relpos/py.typed",
        "relpos/recipes/messages.yaml",
        "_relpos_command.py",
    } <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
