"""`relpos doctor`: each section, the answers of `explain_backends`, advice, and work where torch is alone."""

import importlib.metadata
import io
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import _relpos_command
import relpos
from relpos import _dispatch, explain_backends
from relpos._doctor import cases, compiled, examine, machine, report, software, waiting, write_report
from relpos._doctor.alone import run_alone
from relpos._doctor.check import NO_BREAK, Complain, Finding
from relpos.backends import cpu, triton
from relpos.backends.backend import Backend
from relpos.cli import app, run

SECTIONS = ["versions", "packages", "machine", "compiled", "attention"]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Run `relpos doctor` in a terminal of 80 columns, and return what it prints."""

    def call() -> str:
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        assert run(["doctor"]) == 0
        out, errors = capsys.readouterr()
        assert errors == ""
        return out

    return call


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs beside the tests is no matter of theirs."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


def _problems() -> dict[str, str]:
    return {problem.problem: problem.advice for problem in examine().problems}


# what it prints


def test_every_section_is_told_in_order(told: Callable[[], str]) -> None:
    out = told()
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == [*SECTIONS, "advice"]
    assert NO_BREAK not in out
    assert relpos.__version__ in out
    assert str(torch.__version__) in out
    assert torch.backends.cpu.get_cpu_capability() in out


def test_every_case_stands_above_its_table(told: Callable[[], str]) -> None:
    lines = [" ".join(line.split()) for line in told().partition("\nattention\n")[2].splitlines()]
    text = " ".join(lines)
    for name, case in cases.CASES.items():
        table = " ".join(str(case.explain(torch.device("cpu"))).split())
        assert name in text
        assert table in text[text.index(name) :]


def test_no_line_is_wider_than_the_terminal(told: Callable[[], str]) -> None:
    for line in told().splitlines():
        # a path or a command is never cut
        assert len(line) <= 80 or " " not in line.strip().removeprefix("from ")


def test_json_holds_the_answers_of_explain_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values) == [*SECTIONS, "problems"]
    assert values["versions"]["torch"]["version"] == str(torch.__version__)
    assert list(values["attention"]["cpu"]) == list(cases.CASES)
    for name, case in cases.CASES.items():
        tensors, options = case.arguments(torch.device("cpu"))
        table = explain_backends(*tensors, **options)
        assert values["attention"]["cpu"][name] == {"chosen": table.chosen, "reasons": dict(table)}


def test_cases_are_what_they_are_called() -> None:
    made = {name: case.arguments(torch.device("cpu")) for name, case in cases.CASES.items()}
    assert made["4,096 tokens"][0][0].shape[2] == 4096
    assert made["causal"][1] == {"is_causal": True}
    assert made["dropout"][1]["dropout_p"] > 0
    assert made["padding (key_lengths)"][1]["key_lengths"].tolist() == [256] * 4
    assert made["dense mask (attn_mask)"][1]["attn_mask"].shape == (512, 512)
    step, options = made["one query on a cache of 4,096"]
    assert (step[0].shape[2], step[1].shape[2], options["query_start"]) == (1, 4096, 4095)
    assert made["bfloat16"][0][0].dtype == torch.bfloat16
    assert made["float64"][0][0].dtype == torch.float64
    assert made["grouped heads (8 on 2)"][0][1].shape[1] == 2
    assert made["values narrower than keys"][0][2].shape[3] == 32
    assert made["labelled relations"][1]["relations"].shape == (512, 512)
    assert not any(x.requires_grad for x in made["without gradients"][0])
    assert all(x.requires_grad for x in made["512 tokens"][0])


def test_relations_are_asked_as_relations(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(inputs: Any) -> list[str]:
        return ["these are labels"] if inputs.relations is not None else []

    by_distance = Backend("by_distance", why_not, lambda inputs: (inputs.query, None))
    monkeypatch.setattr(_dispatch, "BACKENDS", (by_distance,))
    assert "\n       labelled relations\n         by_distance: these are labels\n" in told()


def test_unknown_option_is_wrong_use_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--jsno"]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert len(errors.splitlines()) == 1
    assert "--jsno" in errors


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_processor_name", lambda: "Prozessor für alles")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_report(as_json=False)
    assert rb"Prozessor f\xfcr alles" in written.getvalue()


# what fails


@pytest.mark.parametrize("owner", ["get_cpu_capability", "get_num_threads"])
def test_probe_that_raises_is_a_line(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    def fail() -> None:
        raise RuntimeError("it is\nbroken")

    place = torch.backends.cpu if owner == "get_cpu_capability" else torch
    monkeypatch.setattr(place, owner, fail)
    out = told()
    name = "instructions" if owner == "get_cpu_capability" else "threads"
    assert re.search(rf"{name} +could not be told \(RuntimeError: it is broken\)", out)
    assert f"- {name} could not be told.\n    Report it, with this output." in out
    assert ": chosen\n" in out


def test_devices_that_cannot_be_listed_leave_the_cpu(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    out = told()
    assert re.search(r"GPU +could not be told \(RuntimeError: no driver\)", out)
    assert ": chosen\n" in out


def test_case_that_raises_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*tensors: torch.Tensor, **options: Any) -> Any:
        if "dropout_p" in options:
            raise RuntimeError("no dropout here")
        return explain_backends(*tensors, **options)

    monkeypatch.setattr(cases, "explain_backends", ask)
    found = examine()
    answers = found.sections["attention"]["cpu"].value
    assert answers["dropout"] == {"error": "RuntimeError: no dropout here"}
    assert answers["causal"]["chosen"] is not None
    assert "dropout on cpu could not be told." in [problem.problem for problem in found.problems]


def test_warning_is_a_problem_told_once(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> bool:
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert told().count("  - a warning: the driver is too old\n    Mend what it names.\n") == 1


def test_case_that_no_backend_serves_is_a_problem(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(inputs: Any) -> list[str]:
        return ["it cannot drop weights", "nor anything else"] if inputs.dropout_p > 0 else []

    picky = Backend("picky", why_not, lambda inputs: (inputs.query, None))
    monkeypatch.setattr(_dispatch, "BACKENDS", (picky,))
    out = told()
    assert "\n       dropout\n         picky: it cannot drop weights; nor anything else\n" in out
    assert "  - on cpu no backend serves dropout.\n" in out


# advice


def test_nothing_wrong_is_said(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ask", lambda name, probe, problems: Finding({}, "well"))
    assert told().endswith("\nadvice\n  No problem found.\n")


@pytest.mark.parametrize(
    ("threads", "cores", "problem"),
    [
        (1, 16, "torch computes with 1 thread on 16 cores."),
        (8, 16, None),
        (16, 16, None),
        (1, 2, None),
        (64, 1, "torch computes with 64 threads on 1 core: they wait."),
    ],
)
def test_threads_that_do_not_suit_the_cores_are_told(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, problem: str | None
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    found = [name for name in _problems() if name.startswith("torch computes")]
    assert found == ([problem] if problem else [])


THREADS_ADVICE = "Unset OMP_NUM_THREADS, or set it to the cores that you mean to use."


@pytest.mark.parametrize("limit", ["", "none", "0", "-1", "1.5", ",2", "\u00b2"])
def test_a_limit_on_threads_that_is_no_positive_integer_is_told(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    told = f"OMP_NUM_THREADS must be a positive integer; it is {limit!r}, which torch ignores."
    assert _problems()[told] == THREADS_ADVICE


@pytest.mark.parametrize(
    ("limit", "threads", "problem"),
    [
        ("64", 2, "OMP_NUM_THREADS asks for 64 threads on 2 cores; torch computes with 2."),
        ("64,2", 2, "OMP_NUM_THREADS asks for 64 threads on 2 cores; torch computes with 2."),
        ("64", 64, "torch computes with 64 threads on 2 cores: they wait."),
        ("2", 2, None),
        (" 1 ", 1, None),
        ("2,4", 2, None),
        (None, 2, None),
    ],
)
def test_a_limit_above_the_cores_is_told_once(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, threads: int, problem: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    found = {told: advice for told, advice in _problems().items() if "threads" in told or "OMP" in told}
    assert found == ({problem: THREADS_ADVICE} if problem else {})


def test_a_quota_of_its_container_limits_the_threads_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("RELPOS_CHOSEN", "GOMP_SPINCOUNT,OMP_NUM_THREADS")
    found = examine()
    assert not [name for name, _ in found.problems if "threads" in name]
    assert "1.5 CPUs by the quota" in found.sections["machine"]["processor"].text
    assert found.sections["machine"]["threads"].text.endswith("chosen by this command for the quota")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert "torch computes with 16 threads on 2 cores: they wait." in _problems()


@pytest.mark.parametrize(
    ("set_to", "told", "is_long"),
    [
        ({}, "its default", True),
        ({"GOMP_SPINCOUNT": "10000"}, "GOMP_SPINCOUNT=10000", False),
        ({"GOMP_SPINCOUNT": "infinite"}, "GOMP_SPINCOUNT=infinite", True),
        ({"GOMP_SPINCOUNT": "300000"}, "GOMP_SPINCOUNT=300000", True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "OMP_WAIT_POLICY=PASSIVE", False),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active", True),
        (
            {"GOMP_SPINCOUNT": "10000", "RELPOS_CHOSEN": "GOMP_SPINCOUNT"},
            "GOMP_SPINCOUNT=10000, chosen by this command",
            False,
        ),
    ],
)
def test_how_threads_wait_is_told_and_is_a_problem_on_a_busy_machine_alone(
    monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], told: str, is_long: bool
) -> None:
    for name in (*waiting._NAMES, "RELPOS_CHOSEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(waiting, "_library", lambda: "libgomp")
    for load, is_busy in ((12.0, True), (1.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        monkeypatch.setattr(waiting, "num_cores", lambda: 2)
        problems: list[str] = []
        found = waiting._waiting(lambda problem, advice, told=problems: told.append(problem))
        assert found.text.splitlines()[0] == f"libgomp: {told}"
        assert found.value["chosen"] == (["GOMP_SPINCOUNT"] if "RELPOS_CHOSEN" in set_to else [])
        busy = "the machine is busy (6.0 tasks a core), and threads that wait spin for long."
        assert problems == ([busy] if is_busy and is_long else [])


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux the doctor sees which OpenMP is loaded")
def test_the_openmp_that_torch_has_loaded_is_told() -> None:
    assert examine().sections["machine"]["waiting"].value["library"] in ("libgomp", "libiomp5", "libomp")


def test_without_proc_the_processor_has_the_name_of_its_kind(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(path: Path, **options: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "odd64")
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(Path, "read_text", absent)
    assert re.search(r"\n  processor +odd64, 2 cores for this process\n", told())


def test_missing_numpy_is_a_note_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = software.version_probes()["torch"]
    problems: list[str] = []
    version = importlib.metadata.version
    assert "NumPy" not in torchs(lambda problem, advice: problems.append(problem)).text

    def without(name: str) -> str:
        if name == "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    found = torchs(lambda problem, advice: problems.append(problem))
    assert found.value["numpy"] is None
    assert found.text.endswith("\nNumPy is missing; torch warns of it once, and works: pip install numpy")
    assert problems == []


def test_old_torch_is_told_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.9.1+cpu" if name == "torch" else version(name)
    )
    assert _problems()["torch must be >=2.10; 2.9.1+cpu is installed."] == "pip install --upgrade relpos"


def test_missing_packages_are_told_with_the_extra_that_brings_them(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("matplotlib", "jinja2"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert 'plots      missing: matplotlib, jinja2\n             pip install "relpos[plots]"\n' in told()


def test_every_extra_of_the_distribution_is_told() -> None:
    found = examine().sections["packages"]
    assert list(found) == ["always", *importlib.metadata.metadata("relpos").get_all("Provides-Extra")]
    assert found["always"].value["packages"]["torch"]["version"] == importlib.metadata.version("torch")
    assert "typer" in found["translate"].value["packages"]
    assert sorted(found["demo"].value["includes"]) == ["plots", "translate"]


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.10.0", ">=2.10", True),
        ("2.13.0+cpu", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("6.0", "<6,>=5.24", False),
        ("5.30.1", "<6, >=5.24", True),
        ("1", "", True),
        ("1", "==2.*", True),
        ("odd", ">1", False),
    ],
)
def test_versions_are_compared_by_number(version: str, wanted: str, expected: bool) -> None:
    assert software.fits(version, wanted) is expected


def test_processor_without_vector_instructions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    told = "torch uses no vector instructions of this processor."
    assert _problems()[told] == "Unset ATEN_CPU_CAPABILITY."
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert told not in _problems()


# the CPU kernel


@pytest.fixture
def doctor_with(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `relpos doctor` says, as JSON and as text, where the kernel is a file of these bytes or None."""

    def call(content: bytes | None, **environment: str) -> dict[str, Any]:
        path = tmp_path / "kernel.so"
        if content is not None:
            path.write_bytes(content)
        outs = [
            subprocess.run(
                [sys.executable, "-m", "relpos", "doctor", *arguments],
                env={**os.environ, "RELPOS_CPU_KERNEL": str(path), "COLUMNS": "80", **environment},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            ).stdout
            for arguments in (["--json"], [])
        ]
        return {**json.loads(outs[0]), "path": str(path), "text": outs[1]}

    return call


# an ELF file's head: for x86-64 its machine is 62, for arm64 183; here one that nobody has
FOR_ANOTHER_MACHINE = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes([3, 0, 250, 0, 1, 0, 0, 0]) + bytes(40)


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (None, "is missing"),
        (b"", "does not load"),
        (b"not a library\n" * 100, "does not load"),
        (FOR_ANOTHER_MACHINE, "does not load"),
        (FOR_ANOTHER_MACHINE[:60], "does not load"),
        # mapped, such a file would end the process
        (
            FOR_ANOTHER_MACHINE[:40] + (10**6).to_bytes(8, "little") + FOR_ANOTHER_MACHINE[48:],
            "does not load",
        ),
    ],
)
def test_kernel_that_cannot_be_used_is_told_and_others_serve(
    doctor_with: Callable[..., dict[str, Any]], content: bytes | None, state: str
) -> None:
    found = doctor_with(content)
    kernel = found["compiled"]["CPU kernel"]
    assert kernel["path"] == found["path"]
    assert (kernel["built"], kernel["loads"], kernel["instructions"]) == (content is not None, False, None)
    advice = {problem["problem"]: problem["advice"] for problem in found["problems"]}
    told = advice[f"the CPU kernel {state}: attention on the CPU is slower."]
    assert told.startswith("Unset RELPOS_CPU_KERNEL, or have it name a kernel")
    assert re.search(rf"\ncompiled\n  CPU kernel +{state}", found["text"])
    for answer in found["attention"]["cpu"].values():
        assert answer["reasons"]["cpu"][0] == kernel["reason"]
        assert answer["chosen"] in ("merged", "dense")


def test_missing_kernel_of_the_package_is_told_with_what_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RELPOS_CPU_KERNEL", raising=False)
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(cpu, "UNAVAILABLE", "was not built")
    advice = _problems()["the CPU kernel is missing: attention on the CPU is slower."]
    assert advice.startswith("Have g++ or clang++, then run `pip install -v --no-deps -e ")


def test_kernel_for_windows_is_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(cpu, "UNAVAILABLE", "was not built")
    monkeypatch.setattr(compiled.sys, "platform", "win32")
    problems: list[str] = []
    found = compiled.compiled_probes()["CPU kernel"](lambda problem, advice: problems.append(problem))
    assert (found.text, problems) == ("none for Windows", [])


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (None, None),
        ("baseline", None),
        (
            "avx3",
            "RELPOS_CPU must be one of avx512, avx2, baseline; it is 'avx3', which the kernel refuses.",
        ),
    ],
)
def test_kernel_that_loads_is_told_with_its_instructions_and_limit(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch, limit: str | None, problem: str | None
) -> None:
    monkeypatch.setattr(cpu, "UNAVAILABLE", None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.delenv("RELPOS_CPU", raising=False)
    if limit is not None:
        monkeypatch.setenv("RELPOS_CPU", limit)
    source = f", RELPOS_CPU={limit}" if limit else ""
    state = "and refuses to run" if problem else "with instructions avx2"
    assert f"\n  CPU kernel   loads, {state}{source}\n" in told()
    found = {told: advice for told, advice in _problems().items() if "RELPOS_CPU" in told}
    assert found == ({problem: "Unset RELPOS_CPU."} if problem else {})


# the GPU kernels


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Finding, dict[str, str]]]:
    """What is found of them, and the advice for each problem, where Triton and torch are as they are told."""

    def call(
        version: str | None = "3.7.1",
        *,
        cuda: str | None = "13.0",
        reason: str | None = None,
        is_interpreted: bool = False,
        named: str = 'triton==3.7.1; platform_system == "Linux"',
    ) -> tuple[Finding, dict[str, str]]:
        monkeypatch.setattr(triton, "UNAVAILABLE", reason)
        monkeypatch.setattr(triton, "IS_INTERPRETED", is_interpreted)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(compiled, "find_spec", lambda name: version and name)
        monkeypatch.setattr(compiled, "_triton_version", lambda: version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["filelock", named])
        advice: dict[str, str] = {}
        return compiled.compiled_probes()["GPU kernels"](advice.__setitem__), advice

    return call


Found = Callable[..., tuple[Finding, dict[str, str]]]
ABSENT = "needs Triton, which does not import: No module named 'triton'"


@pytest.mark.parametrize(
    ("version", "note"),
    [("3.7.1", "Triton 3.7.1 is installed"), (None, "Triton is not installed; GPUs alone use it")],
)
def test_gpu_kernels_without_torch_for_cuda_are_no_problem(
    gpu_kernels: Found, version: str | None, note: str
) -> None:
    found, advice = gpu_kernels(version, cuda=None, reason="needs a build of torch for CUDA")
    assert found.text == f"none: needs a build of torch for CUDA\n{note}"
    assert (found.value["available"], found.value["triton"]) == (False, version)
    assert advice == {}


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ('triton==3.7.1; platform_system == "Linux"', "triton==3.7.1"),
        ("pytorch-triton (==3.9.0+git1)", "pytorch-triton==3.9.0+git1"),
        ("triton-free>=1", "triton"),
        ("sympy", "triton"),
    ],
)
def test_missing_triton_is_told_with_the_version_that_torch_names(
    gpu_kernels: Found, named: str, wanted: str
) -> None:
    found, advice = gpu_kernels(None, reason=ABSENT, named=named)
    told = "Triton is not installed: the GPU kernels cannot be compiled, and attention on GPUs is slower."
    assert advice == {told: f'pip install "{wanted}"'}
    assert found.text == f"none: {ABSENT}"


def test_triton_that_does_not_import_is_told(gpu_kernels: Found) -> None:
    reason = "needs Triton, which does not import: libtriton.so: cannot open shared object file"
    found, advice = gpu_kernels(reason=reason)
    told = (
        "Triton 3.7.1 does not import: the GPU kernels cannot be compiled, and attention on GPUs is slower."
    )
    assert advice == {told: 'pip install --force-reinstall "triton==3.7.1"'}
    assert found.text == f"none: {reason}"


def test_interpreted_gpu_kernels_are_told(gpu_kernels: Found) -> None:
    found, advice = gpu_kernels(cuda=None, is_interpreted=True)
    told = "TRITON_INTERPRET is set: GPU kernels run on no GPU but on the CPU, very slowly."
    assert advice == {told: "Unset TRITON_INTERPRET; it is for tests."}
    assert found.text == "interpreted on the CPU by Triton 3.7.1"
    assert found.value["interpreted"]


def test_gpus_that_the_kernels_are_for_are_told_once(
    gpu_kernels: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _fake_gpus(monkeypatch, (8, 0), ["sm_80"])
    _fake_build_tools(monkeypatch, tmp_path, ["gcc"], has_headers=True)
    found, advice = gpu_kernels()
    assert found.text.splitlines() == [
        "compiled by Triton 3.7.1 when they are first used",
        "for Card, compute capability 8.0",
    ]
    assert found.value["devices"] == [{"name": "Card", "capability": "8.0"}]
    assert advice == {}


def test_gpu_that_is_too_old_for_the_kernels_is_told(
    gpu_kernels: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_gpus(monkeypatch, (7, 5), ["sm_75"])
    found, advice = gpu_kernels()
    told = "the GPU kernels need compute capability 8.0 or more; Card has 7.5."
    assert advice == {told: "Use a newer GPU, or on this one another backend."}
    assert found.text.endswith("\nno GPU here that they are for")


def test_gpu_kernels_without_a_gpu_are_no_problem(
    gpu_kernels: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, advice = gpu_kernels()
    assert (found.value["available"], found.value["devices"], advice) == (True, [], {})
    assert found.text.endswith("\nno GPU here that they are for")


def _fake_build_tools(
    monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], *, has_headers: bool
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton.shutil, "which", lambda name: name if name in names else None)
    monkeypatch.setattr(triton.sysconfig, "get_paths", lambda: {"include": str(folder)})
    if has_headers:
        (folder / "Python.h").touch()


@pytest.mark.parametrize(
    ("own", "names", "has_headers", "expected"),
    [
        (None, ["gcc"], True, []),
        (None, ["clang"], True, []),
        ("cc-15", ["cc-15"], True, []),
        ("cc-15", ["gcc"], True, ["finds no cc-15."]),
        (None, ["cc"], True, ["finds no gcc or clang."]),
        (None, ["gcc"], False, ["Python.h is missing."]),
        (None, [], False, ["finds no gcc or clang.", "Python.h is missing."]),
    ],
)
def test_what_triton_builds_its_launcher_with_is_told_where_it_is_missing(
    gpu_kernels: Found,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str | None,
    names: list[str],
    has_headers: bool,
    expected: list[str],
) -> None:
    _fake_gpus(monkeypatch, (9, 0), ["sm_90"])
    _fake_build_tools(monkeypatch, tmp_path, names, has_headers=has_headers)
    if own is not None:
        monkeypatch.setenv("CC", own)
    missing = triton.missing_to_launch()
    _, advice = gpu_kernels(reason=triton.NO_LAUNCH + missing[0] if missing else None)
    assert len(missing) == len(advice) == len(expected)
    for problem, end in zip(advice, expected, strict=True):
        assert problem.startswith("Triton needs ")
        assert problem.endswith(end)


def test_broken_triton_stops_neither_relpos_nor_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('its library\\nis missing; so it is')\n")
    done = subprocess.run(
        [sys.executable, "-m", "relpos", "doctor", "--json"],
        # so that it is imported whatever torch is built for
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    values = json.loads(done.stdout)
    kernels = values["compiled"]["GPU kernels"]
    assert (kernels["available"], kernels["devices"]) == (False, [])
    assert kernels["reason"].startswith("needs Triton, which does not import: its library")
    assert any("does not import" in problem["problem"] for problem in values["problems"])
    for answer in values["attention"]["cpu"].values():
        assert kernels["reason"] in answer["reasons"]["triton"]
        assert answer["chosen"] != "triton"


# GPUs


def _fake_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str]) -> None:
    gpu = SimpleNamespace(name="Card", major=capability[0], minor=capability[1], total_memory=3 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)


def _cards(complain: Complain) -> tuple[Finding, Finding]:
    return machine.machine_probes()["GPU"](complain), machine.devices(complain)


def test_each_device_has_its_own_table(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(inputs: Any) -> list[str]:
        return [f"not on {inputs.query.device}"] if inputs.query.device.type != "cpu" else []

    monkeypatch.setattr(report, "devices", lambda complain: Finding({"names": ["cpu", "meta"]}, ""))
    monkeypatch.setattr(
        _dispatch, "BACKENDS", (Backend("local", why_not, lambda inputs: (inputs.query, None)),)
    )
    out = told()
    assert re.search(r"\n  cpu   [^:]*\n +local: chosen\n", out)
    assert re.search(r"\n  meta  [^:]*\n +local: not on meta\n", out)
    assert "  - on meta no backend serves short sentences (64 x 32 tokens), 512 tokens," in out


def test_gpus_are_told_by_name_capability_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, (9, 0), ["sm_80", "sm_90"])
    problems: list[str] = []
    gpu, devices = _cards(lambda problem, advice: problems.append(problem))
    assert gpu.text.splitlines() == [f"{i}: Card, compute capability 9.0, 3.0 GiB" for i in (0, 1)]
    # two cards of one kind answer alike
    assert devices.value["names"] == ["cpu", "cuda:0"]
    assert problems == []


@pytest.mark.parametrize(
    ("capability", "built", "is_served"),
    [
        ((8, 6), ["sm_80"], True),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "compute_75"], False),
    ],
)
def test_gpu_that_torch_has_no_kernels_for_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str], is_served: bool
) -> None:
    _fake_gpus(monkeypatch, capability, built)
    problems: list[str] = []
    _cards(lambda problem, advice: problems.append(problem))
    expected = f"this torch has no kernels for Card, compute capability {capability[0]}.{capability[1]}."
    assert problems == ([] if is_served else [expected] * 2)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_driver_without_a_gpu_for_torch_is_told(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problems: list[str] = []
    gpu, devices = _cards(lambda problem, advice: problems.append(f"{problem} {advice}"))
    assert gpu.text == "none that torch can use"
    assert devices.value["names"] == ["cpu"]
    assert len(problems) == 1
    assert ("torch is built for the CPU" if cuda is None else "Check CUDA_VISIBLE_DEVICES") in problems[0]


# torch alone


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python where relpos, torch and what torch needs are installed, and nothing else is."""
    site = tmp_path_factory.mktemp("site")
    names, seen = ["torch"], set()
    while names:
        name = names.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # another platform's
        needed = [line for line in distribution.requires or [] if "extra ==" not in line]
        names += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed]
        _link(distribution, site)
    _link(importlib.metadata.distribution("relpos"), site)
    (site / "relpos").symlink_to(Path(relpos.__file__).parent)
    (site / "_relpos_command.py").symlink_to(str(_relpos_command.__file__))

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        # -S leaves out the folder of installed packages; torch itself warns where NumPy is missing
        return subprocess.run(
            [sys.executable, "-S", "-W", "ignore:Failed to initialize NumPy:UserWarning", *arguments],
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
            text=True,
            check=False,
            timeout=120,
            **({"capture_output": True} | options),
        )

    return call


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in distribution.files or []}
    for top in tops - {"..", "__pycache__"}:
        if not top.startswith("__editable__") and top != "relpos" and not (site / top).exists():
            (site / top).symlink_to(distribution.locate_file(top))


def test_torch_alone_is_enough(alone: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = alone("-m", "relpos", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"always +torch \d", done.stdout)
    assert "missing: transformers, accelerate" in done.stdout
    assert 'pip install "relpos[translate]"' in done.stdout
    assert ": chosen\n" in done.stdout


def test_json_of_the_installed_command_needs_torch_alone(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = alone("-c", "import sys; from relpos.cli import main; sys.exit(main())", "doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    missing = values["packages"]["translate"]["missing"]
    assert {"typer", "rich", "transformers"} <= set(missing)
    assert list(values["attention"]["cpu"]) == list(cases.CASES)


def test_without_typer_other_commands_name_their_extra(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = alone("-m", "relpos", "train", "numbers", "--out", "run")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "No module named 'typer'" in done.stderr
    assert 'pip install "relpos[translate]"; relpos doctor runs without.' in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--help", "train"]])
def test_without_typer_help_lists_every_command_under_the_extra_it_needs(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_alone(arguments, ImportError("no typer")) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    ready, *needing = out.split("\nCommands")[1:]
    assert re.findall(r"^  (\w+)", ready, re.MULTILINE) == ["doctor"]
    listed = {
        re.search(r"relpos\[(\w+)\]", part)[1]: re.findall(r"^  (\w+)", part, re.MULTILINE)
        for part in needing
    }
    extras = importlib.metadata.metadata("relpos").get_all("Provides-Extra")
    assert set(listed) <= set(extras)
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert sorted(["doctor", *itertools.chain.from_iterable(listed.values())]) == sorted(names)


def test_without_extras_help_and_version_are_told(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for arguments, start in (
        (["--version"], f"relpos {importlib.metadata.version('relpos')}\n"),
        (["--help"], "Usage: relpos COMMAND\n"),
        (["-h"], "Usage: relpos COMMAND\n"),
    ):
        done = alone("-m", "relpos", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(start)


@pytest.mark.parametrize("arguments", [[], ["--json", "doctor"], ["train", "--help"]])
def test_without_typer_whatever_is_not_the_doctor_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_alone(arguments, ImportError("no\ntyper")) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("relpos: the commands need more packages (no typer): ")


def test_without_typer_an_unknown_option_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_alone(["doctor", "--json", "--all"], ImportError("no typer")) == 2
    assert capsys.readouterr() == ("", "relpos: doctor takes --json and nothing else; got '--all'.\n")


@pytest.mark.parametrize("name", ["--help", "-h"])
def test_without_typer_the_doctor_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run_alone(["doctor", name], ImportError("no typer")) == 0
    out, errors = capsys.readouterr()
    assert out.startswith("Usage: relpos doctor [--json]\n")
    assert errors == ""


def test_without_typer_a_full_output_fails_and_a_reader_that_left_does_not(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with open("/dev/full", "w") as full:
        done = alone("-m", "relpos", "doctor", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "relpos: No space left on device.\n")
    readable, writable = os.pipe()
    os.close(readable)
    done = alone("-m", "relpos", "doctor", capture_output=False, stdout=writable, stderr=subprocess.PIPE)
    os.close(writable)
    assert (done.returncode, done.stderr) == (0, "")
