"""The GPU kernels compile ahead of time, without spills; benchmarks/kernel_resources.py says where not."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relpos.backends.triton import backend as triton

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "kernel_resources.py"
KERNELS = {"forward", "prepare", "key_value_gradients", "query_gradients", "table_gradients"}
# in each place what ptxas -v says of a kernel for sm_90
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {stack} bytes cumulative stack size
"""
KIB = 1024
# compute capability 8.6 and 8.9 have less than 8.0, and the same sizes of blocks
LIMITS = {"sm_80": 99 * KIB, "sm_90": 227 * KIB}

# a kernel without a fault
RECORD = {
    "case": "a case",
    "kernel": "forward",
    "target": "sm_80",
    "dtype": "bfloat16",
    "d": 64,
    "compiled_in": "k 16 plain",
    "blocks": {"BLOCK_Q": 64},
    "warps": 4,
    "stages": 2,
    "registers": 200,
    "spill_stores": 0,
    "spill_loads": 0,
    "shared": 1000,
    "shared_limit": LIMITS["sm_80"],
    "programs": {"registers": 2, "warps": 16, "shared": 9, "all": 2},
    "reason": None,
}

needs_triton = pytest.mark.skipif(triton.UNAVAILABLE is not None, reason=str(triton.UNAVAILABLE))

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the script in a process in which kernels are compiled and not interpreted."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return subprocess.run(
            [sys.executable, SCRIPT, "--json", tmp_path / "records.jsonl", *arguments],
            env={**kept, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
            # a test that hangs ends by its own limit first
            timeout=7200,
        )

    return call


@pytest.fixture
def resources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/kernel_resources.py."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return importlib.import_module("kernel_resources")


def records_in(folder: Path) -> list[dict[str, Any]]:
    """What the script wrote."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@needs_triton
def test_kernels_in_bfloat16_compile_without_spills(run: Run, tmp_path: Path) -> None:
    cases = ["bfloat16 d 64 k 16 plain", "bfloat16 d 64 k 16 causal"]
    done = run("--cases", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    records = records_in(tmp_path)
    found = {(x["case"], x["target"], x["kernel"]) for x in records}
    assert found == {
        (case, target, kernel) for case in cases for target in ("sm_80", "sm_90") for kernel in KERNELS
    }
    for x in records:
        assert x["spill_stores"] == x["spill_loads"] == 0
        assert 0 < x["registers"] <= 255
        assert 0 < x["shared"] <= LIMITS[x["target"]]
        assert x["programs"]["all"] >= 1
        assert (x["device"], x["how"]) == (None, "compiled without a device")
        assert f"| {x['kernel']} | {x['target']} | bfloat16 | 64 |" in done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_compile_for_every_case(run: Run, resources: ModuleType, tmp_path: Path) -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert {x["case"] for x in records_in(tmp_path)} == {case.name for case in resources.CASES}


@needs_triton
@pytest.mark.parametrize(
    ("pretended", "sentence"),
    [
        (
            """sed 's/ 0 bytes spill stores, 0 bytes/ 8 bytes spill stores, 12 bytes/' "$log" >&2""",
            "must not spill; it spills 20 bytes, at ",
        ),
        ("echo no more registers >&2; exit 1", "does not compile: PTXASError: "),
    ],
    ids=["spills", "fails"],
)
def test_what_the_assembler_says_against_a_kernel_fails_the_script(
    run: Run, tmp_path: Path, pretended: str, sentence: str
) -> None:
    from triton import knobs

    assembler, log = tmp_path / "ptxas", tmp_path / "log"
    assembler.write_text(
        f"""#!/bin/sh
        case "$*" in *--version*) exec "{knobs.nvidia.ptxas.path}" "$@";; esac
        log="{log}"
        "{knobs.nvidia.ptxas.path}" "$@" 2> "$log" || exit
        {pretended}
        """
    )
    assembler.chmod(0o755)
    done = run("--cases", "inference", "--targets", "sm_90", TRITON_PTXAS_PATH=str(assembler))
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: forward for sm_90, bfloat16 d 64 k 16 inference, {sentence}")
    (record,) = records_in(tmp_path)
    assert (record["reason"] is None) == (record.get("spill_stores") == 8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        (
            {"spill_stores": 16},
            "forward for sm_80, a case, must not spill; it spills 16 bytes, at 200 registers.",
        ),
        (
            {"spill_loads": 4},
            "forward for sm_80, a case, must not spill; it spills 4 bytes, at 200 registers.",
        ),
        ({"spill_stores": 16, "d": 128}, None),
        ({"spill_stores": 16, "dtype": "float32"}, None),
        ({"shared": 99 * KIB}, None),
        (
            {"shared": 99 * KIB + 1, "d": 256},
            "forward for sm_80, a case, may have at most 101,376 bytes of shared memory; it needs 101,377.",
        ),
        ({"reason": "it is too large"}, "forward for sm_80, a case, does not compile: it is too large"),
    ],
)
def test_each_fault_of_a_kernel_is_a_sentence_and_status_1(
    resources: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    sentence: str | None,
) -> None:
    monkeypatch.setattr(resources, "compiled", lambda cases, targets, jobs: [RECORD | change])
    monkeypatch.setattr(resources, "circumstances", dict)
    assert resources.main([]) == (0 if sentence is None else 1)
    out, errors = capsys.readouterr()
    assert errors == ("" if sentence is None else f"error: {sentence}\n")
    assert out.endswith(f"\nkernels, compiled without a device: 1; faults: {int(sentence is not None)}\n")


def test_limits_of_shared_memory_are_those_of_any_gpu_that_takes_the_sizes(resources: ModuleType) -> None:
    assert {name: target.shared_of_program for name, target in resources.TARGETS.items()} == LIMITS


def test_report_of_the_assembler_is_read(resources: ModuleType) -> None:
    text = REPORT.format(stack=24, stores=16, loads=20, registers=255)
    assert resources.read_report(text) == {
        "registers": 255,
        "spill_stores": 16,
        "spill_loads": 20,
        "shared": 0,
    }
    with_shared = text.replace("used 1 barriers", "used 1 barriers, 128 bytes smem")
    assert resources.read_report(with_shared)["shared"] == 128


@pytest.mark.parametrize("text", ["", "ptxas info    : 0 bytes gmem", "ptxas info : Used 20 registers"])
def test_what_is_no_report_of_the_assembler_is_refused(resources: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="ptxas must report registers and spills; got "):
        resources.read_report(text)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "target", "expected"),
    [
        # 168 * 32 registers a warp: three warps in each quarter of 16,384
        (168, 4, 48 * KIB, "sm_80", {"registers": 3, "warps": 16, "shared": 3, "all": 3}),
        # 255 become 256, and two warps fit a quarter
        (255, 8, 48 * KIB, "sm_90", {"registers": 1, "warps": 8, "shared": 4, "all": 1}),
        # each program has 1 KiB for the system
        (32, 4, 163 * KIB, "sm_80", {"registers": 16, "warps": 16, "shared": 1, "all": 1}),
        (32, 4, 163 * KIB + 1, "sm_80", {"registers": 16, "warps": 16, "shared": 0, "all": 0}),
        # never more than 32
        (16, 1, 0, "sm_90", {"registers": 128, "warps": 64, "shared": 228, "all": 32}),
    ],
)
def test_programs_of_a_multiprocessor_are_what_its_resources_allow(
    resources: ModuleType, registers: int, warps: int, shared: int, target: str, expected: dict[str, int]
) -> None:
    assert resources.programs(registers, warps, shared, resources.TARGETS[target]) == expected


def test_nothing_is_compiled_under_the_interpreter(
    resources: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as raised:
        resources.main([])
    assert raised.value.code == 2
    assert "TRITON_INTERPRET must not be set" in capsys.readouterr().err


def test_unknown_case_is_wrong_use_and_names_the_cases(
    resources: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        resources.main(["--cases", "bfloat17"])
    assert raised.value.code == 2
    assert "got ['bfloat17']. Cases: bfloat16 d 64 k 16 plain; " in capsys.readouterr().err


def test_cases_have_names_of_their_own(resources: ModuleType) -> None:
    names = [case.name for case in resources.CASES]
    assert len(set(names)) == len(names)
