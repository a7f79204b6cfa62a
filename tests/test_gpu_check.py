"""benchmarks/gpu_check.sh: a whole rehearsal on a CPU, how it ends, and what it refuses."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relpos.backends.triton import backend as triton

FOLDER = Path(__file__).parents[1] / "benchmarks"
SIDES = ["sdpa_flash", "sdpa_cudnn", "flex", "gather", "merged", "triton"]
has_gpu = torch.version.cuda is not None and torch.cuda.is_available()
FACTS = {
    *("what", "run", "rehearsal", "device", "device_name", "machine", "threads", "torch", "commit", "kernel"),
    *("capability", "driver", "cuda", "triton"),
}


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run benchmarks/gpu_check.sh with this Python."""
    return subprocess.run(
        ["bash", str(FOLDER / "gpu_check.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A whole rehearsal: how it ended, its folder, its records, and its page."""
    folder = tmp_path_factory.mktemp("gpu")
    done = check("--rehearse", "--processes", "2", "--out", str(folder))
    records = [json.loads(line) for line in (folder / "gpu-rehearsal.jsonl").read_text().splitlines()]
    page = (folder / "gpu-rehearsal.md").read_text()
    return SimpleNamespace(done=done, folder=folder, records=records, page=page)


def test_a_rehearsal_runs_the_suite_and_every_side_and_ends_well(rehearsal: SimpleNamespace) -> None:
    assert rehearsal.done.returncode == 0, rehearsal.done.stdout + rehearsal.done.stderr
    suite, *measured = rehearsal.records
    assert (suite["what"], suite["is_passed"], suite["reason"]) == ("conformance", True, None)
    assert (suite["is_finished"], suite["processes"]) == (True, 2)
    here = {*SIDES[:2], "gather", "merged"}
    if triton.UNAVAILABLE is None:
        here.add("triton")
    for name in here & {"merged", "triton"}:
        assert suite["counts"][name] == {"passed": 3, "failed": 0, "skipped": 0}
    assert [x["side"] for x in measured] == SIDES * 3
    assert list(dict.fromkeys((x["length"], x["is_causal"], x["pass"]) for x in measured)) == [
        (64, False, "forward"),
        (64, False, "both"),
        (128, True, "forward"),
    ]
    for x in measured:
        is_flex_forward = x["side"] == "flex" and x["pass"] == "forward"
        assert (x["seconds"] is not None) == (x["side"] in here or is_flex_forward), x["reason"]
        if x["seconds"] is not None:
            assert (x["reason"], x["turns"], x["is_failure"]) == (None, 2, False)
            assert min(x["seconds"], x["wall_seconds"], x["ratio_to_flash"], x["ratio_to_gather"]) > 0
            # a CPU's memory is not measured
            assert x["peak_mib"] is None


def test_a_side_that_fails_is_recorded_with_its_reason_and_the_others_go_on(
    rehearsal: SimpleNamespace,
) -> None:
    failed = [x for x in rehearsal.records[1:] if x["is_failure"]]
    assert {(x["side"], x["pass"]) for x in failed} == {("flex", "both")}
    for x in failed:
        assert x["reason"].startswith("NotImplementedError: FlexAttention does not support backward on CPU")
        assert (x["seconds"], x["ratio_to_flash"], x["turns"]) == (None, None, 0)
    assert "FlexAttention, keys only, d 16, k 4, n 64, both: NotImplementedError: " in rehearsal.page


def test_nothing_of_a_rehearsal_can_be_taken_for_a_measurement(rehearsal: SimpleNamespace) -> None:
    assert all(x["rehearsal"] is True and x["device"] == "cpu" for x in rehearsal.records)
    assert all(x.keys() >= FACTS for x in rehearsal.records)
    assert len({x["run"] for x in rehearsal.records}) == 1
    assert sorted(path.name for path in rehearsal.folder.iterdir()) == [
        "gpu-rehearsal.jsonl",
        "gpu-rehearsal.md",
        "gpu-rehearsal.png",
    ]
    headings = [line for line in rehearsal.page.splitlines() if line.startswith("#")]
    of_numbers = [line for line in headings if "d 16" in line or line.startswith("# ")]
    assert len(of_numbers) == 4
    assert all("REHEARSAL" in line for line in of_numbers)
    verdicts = [
        line for line in rehearsal.page.splitlines() if "| two-sided |" in line or "| causal |" in line
    ]
    assert len(verdicts) == 8
    assert all("| not measured | a rehearsal measures nothing |" in line for line in verdicts)


@pytest.mark.skipif(has_gpu, reason="this machine has a GPU")
def test_without_a_gpu_the_script_ends_with_one_sentence_and_status_2(tmp_path: Path) -> None:
    done = check("--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: an NVIDIA GPU ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--budget", "4m"], {}, "--budget must be a whole number of seconds; got '4m'. See --help."),
        (["--suite"], {}, "--suite needs a value. See --help."),
        (["--processes", "0"], {}, "--processes must be a number from 1 to 99; got '0'. See --help."),
        (["--fast"], {}, "there is no option '--fast'. See --help."),
        ([], {"PYTHON": "no-such-python"}, "PYTHON must be a Python; got 'no-such-python', which is none."),
    ],
)
def test_the_script_refuses_wrong_use_in_one_line(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = check(*arguments, **environment)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


# what the script runs, in place of Python: it writes down its arguments and ends as the test says
STUB = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *gpu_device.py*) echo gpu-x.jsonl ;;
  *gpu_conformance.py*) exit "$SUITE" ;;
  *gpu_attention.py*) exit "$(sed -n "$(grep -c gpu_attention.py "$CALLS")p" <<< "$CODES")" ;;
esac
"""


@pytest.mark.parametrize(
    ("suite", "codes", "tries", "status"),
    [
        (0, [0], 1, 0),
        (1, [0], 1, 1),
        (0, [1], 1, 1),
        # the device broke twice: what is left is measured in new processes of the same run
        (0, [3, 3, 0], 3, 1),
        (0, [3, 3, 3, 3, 0], 4, 1),
        (0, [137], 1, 1),
    ],
)
def test_the_script_measures_whatever_fails_and_says_so_by_its_status(
    tmp_path: Path, suite: int, codes: list[int], tries: int, status: int
) -> None:
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    given = {"SUITE": str(suite), "CODES": "\n".join(map(str, codes)), "CALLS": str(calls)}
    options = ("--out", str(tmp_path / "out"), "--budget", "5000", "--processes", "3")
    done = check(*options, PYTHON=str(stub), **given)
    assert done.returncode == status, done.stderr
    called = calls.read_text().splitlines()
    measured = [line for line in called if "gpu_attention.py" in line]
    assert len(measured) == tries
    assert len({line.partition("--json")[2] for line in measured}) == 1
    assert f"--json {tmp_path}/out/gpu-x.jsonl --run " in measured[0]
    budget = measured[0].split()[measured[0].split().index("--budget") + 1]
    assert 0 < int(budget) <= 5000
    assert f"gpu_limited.py {int(budget) + 45} {stub} " in measured[0]
    (suite_call,) = (line for line in called if "gpu_conformance.py" in line)
    assert " --seconds 150 --processes 3 --json " in suite_call
    assert "gpu_table.py" in called[-3]
    assert f"plot_gpu.py {tmp_path}/out/gpu-x.jsonl --plot {tmp_path}/out/gpu-x.png" in called[-1]
    assert ("error: measuring ended with status" in done.stderr) == (codes[tries - 1] not in (0, 1))


def test_the_script_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    done = check("--help")
    assert done.returncode == 0
    for option in ("--out", "--budget", "--suite", "--processes", "--rehearse", "PYTHON"):
        assert option in done.stdout
    assert "`merged` skips every case of the suite in float64" in done.stdout
    # one number, whichever of the two programs is started
    conformance = importlib.import_module("gpu_conformance")
    assert f"suite is stopped; default: {conformance.SECONDS:g}\n" in done.stdout
    assert conformance._parser().parse_args([]).seconds == conformance.SECONDS


def limited(*arguments: object) -> subprocess.CompletedProcess:
    """Run benchmarks/gpu_limited.py."""
    command = [sys.executable, FOLDER / "gpu_limited.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143)])
def test_a_command_within_its_time_ends_as_it_does(script: str, status: int) -> None:
    assert limited(60, "bash", "-c", script).returncode == status


def test_a_command_that_hangs_is_killed_with_what_it_started() -> None:
    # its pipes close only when nothing of it is left
    done = limited(1, "bash", "-c", "sleep 90 & echo begun; wait")
    assert (done.returncode, done.stdout) == (137, "begun\n")


@pytest.mark.parametrize("arguments", [[], ["5"], ["x", "true"], ["-5", "true"]])
def test_a_limit_needs_seconds_and_a_command(arguments: list[str]) -> None:
    done = limited(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"error: a whole number of seconds and a command are needed; got {arguments}.\n"
