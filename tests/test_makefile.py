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
        ("test-slow", {}, "10000 "),
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
