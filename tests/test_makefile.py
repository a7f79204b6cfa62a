"""The targets of the Makefile: what they hand to the commands that they run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        ("test", {}, "10000 "),
        ("test-triton", {}, "10000 "),
        ("test", {"GOMP_SPINCOUNT": "5"}, "5 "),
        ("test", {"OMP_WAIT_POLICY": "passive"}, " passive"),
    ],
)
def test_tests_run_with_threads_that_do_not_spin_for_long(
    tmp_path: Path, target: str, changes: dict[str, str], expected: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$GOMP_SPINCOUNT $OMP_WAIT_POLICY" > {tmp_path}/seen\n')
    python.chmod(0o755)
    hidden = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        ["make", "-o", f"{tmp_path}/.dev", target, f"VENV={tmp_path}"],
        cwd=ROOT,
        env=environment | changes,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == f"{expected}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("is_ours", [False, True])
def test_cleaning_leaves_folders_that_make_did_not_make(tmp_path: Path, is_ours: bool) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    folders = {"mine": ".torch", "demo": "relpos.json"}
    for folder, mark in folders.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "thesis.txt").write_text("mine")
        if is_ours:
            (tmp_path / folder / mark).touch()
    command = ["make", "clean", "VENV=mine"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert [(tmp_path / folder / "thesis.txt").exists() for folder in folders] == [not is_ours] * 2
