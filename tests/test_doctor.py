"""`relpos doctor`: its report, each check that ends in advice, and that it needs torch alone."""

import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import relpos
from relpos import _dispatch, explain_backends
from relpos._doctor import backends, examine, kernels, machine, packages, report, write_report
from relpos._doctor.check import NO_BREAK, Check, Result
from relpos.backends.backend import Backend
from relpos.backends.cpu import backend as cpu
from relpos.backends.triton import backend as triton
from relpos.cli import run

SECTIONS = ["versions", "packages", "machine", "compiled", "attention"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


def _run(check: Check) -> tuple[Result, dict[str, str]]:
    """The result of one check, and the advice for each problem."""
    advice: dict[str, str] = {}
    return check(advice.__setitem__), advice


def _raise(*_: object) -> Any:
    raise RuntimeError("it is\nbroken")


def _doctor_as_json(*start: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, *(start or ("-m", "relpos")), "doctor", "--json"]
    return json.loads(subprocess.check_output(command, env={**os.environ, **environment}, timeout=120))


# the report


def test_sections_come_in_order_and_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    out, errors = capsys.readouterr()
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert (titles, errors) == ([*SECTIONS, "advice"], "")
    assert NO_BREAK not in out
    for known in (relpos.__version__, str(torch.__version__), torch.backends.cpu.get_cpu_capability()):
        assert known in out
    for line in out.splitlines():
        # a path or a command is never wrapped
        assert len(line) <= 80 or " " not in line.strip().removeprefix("from ")
    attention = " ".join(out.partition("\nattention\n")[2].split())
    for name, case in backends.CASES.items():
        assert " ".join(str(case.explain(CPU)).split()) in attention[attention.index(name) :]


def test_json_holds_the_answers_of_explain_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values) == [*SECTIONS, "problems"]
    assert list(values["attention"]["cpu"]) == list(backends.CASES)
    for name, case in backends.CASES.items():
        tensors, options = case.arguments(CPU)
        table = explain_backends(*tensors, **options)
        assert values["attention"]["cpu"][name] == {"chosen": table.chosen, "reasons": dict(table)}


def test_cases_are_what_they_are_called() -> None:
    made = {name: case.arguments(CPU) for name, case in backends.CASES.items()}
    tensors = {name: arguments[0] for name, arguments in made.items()}
    assert tensors["4,096 tokens"][0].shape[2] == 4096
    assert [x.shape[2] for x in tensors["one query on a cache of 4,096"][:2]] == [1, 4096]
    assert tensors["bfloat16"][0].dtype == torch.bfloat16
    assert tensors["float64"][0].dtype == torch.float64
    assert tensors["grouped heads (8 on 2)"][1].shape[1] == 2
    assert tensors["values narrower than keys"][2].shape[3] == 32
    assert not any(x.requires_grad for x in tensors["without gradients"])
    assert all(x.requires_grad for x in tensors["512 tokens"])
    options = {name: dict(arguments[1]) for name, arguments in made.items() if arguments[1]}
    assert options["padding (key_lengths)"].pop("key_lengths").tolist() == [256] * 4
    assert options["dense mask (attn_mask)"].pop("attn_mask").shape == (512, 512)
    assert options["labelled relations"].pop("relations").shape == (512, 512)
    assert options["one query on a cache of 4,096"] == {"query_start": 4095}
    assert options["causal"] == {"is_causal": True}
    assert options["dropout"]["dropout_p"] > 0


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_processor_name", lambda: "Prozessor für alles")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_report(as_json=False)
    assert rb"Prozessor f\xfcr alles" in written.getvalue()
    assert report.Report({}, []).to_text(80).endswith("advice\n  No problem found.")


def test_a_check_that_raises_is_a_line_and_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*tensors: torch.Tensor, **options: Any) -> Any:
        return _raise() if "dropout_p" in options else explain_backends(*tensors, **options)

    monkeypatch.setattr(torch, "get_num_threads", _raise)
    monkeypatch.setattr(torch.cuda, "is_available", _raise)  # in the check of GPUs and the list of devices
    monkeypatch.setattr(backends, "explain_backends", explain)
    found = examine()
    answers = found.sections["attention"]["cpu"].value
    assert answers["dropout"] == {"error": "RuntimeError: it is broken"}
    assert answers["causal"]["chosen"] is not None
    text = found.to_text(80)
    for name in ("threads", "GPU", "dropout on cpu"):
        assert f"- The check of {name} failed.\n    Report this output as a bug." in text
    assert re.search(r"threads +check failed \(RuntimeError: it is broken\)", text)


def test_a_warning_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # it returns None, which is no device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("old driver", stacklevel=1))
    assert [one.problem for one in examine().problems].count("Warning: old driver") == 1


def test_each_device_has_its_table_and_cases_without_a_backend_are_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why_not(inputs: Any) -> list[str]:
        return [f"not on {inputs.query.device}"] if inputs.query.device.type != "cpu" else []

    local = Backend("local", why_not, lambda inputs: (inputs.query, None))
    monkeypatch.setattr(report, "devices", lambda warn: Result({"names": ["cpu", "meta"]}, ""))
    monkeypatch.setattr(_dispatch, "BACKENDS", (local,))
    text = examine().to_text(80)
    assert re.search(r"\n  cpu   [^:]*\n +local: chosen\n", text)
    assert re.search(r"\n  meta  [^:]*\n +local: not on meta\n", text)
    assert "  - On meta no backend serves short sentences (64 x 32 tokens), 512 tokens," in text
    assert "On cpu no backend" not in text


# machine


@pytest.mark.parametrize(
    ("threads", "cores", "limit", "word"),
    [
        (1, 16, "1", "with 1 thread on 16 cores"),
        (8, 16, "8", None),
        (1, 2, " 1 ", None),
        (2, 2, "2,4", None),
        (64, 1, "64", "with 64 threads on 1 core"),
        *((2, 2, limit, f"positive integer; got {limit!r}") for limit in ("", "0", "1.5", "\u00b2")),
    ],
)
def test_threads_that_do_not_suit_the_cores_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, limit: str, word: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    advice = _run(machine.machine_checks()["threads"])[1]
    assert len(advice) == (word is not None)
    assert all(word in problem for problem in advice)


def test_a_quota_of_its_container_limits_the_threads_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("RELPOS_CHOSEN", "GOMP_SPINCOUNT,OMP_NUM_THREADS")
    checks = machine.machine_checks()
    found, advice = _run(checks["threads"])
    assert advice == {}
    assert found.text.endswith("set by this command to fit the control group")
    assert "limited to 1.5 CPUs" in _run(checks["processor"])[0].text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert "torch computes with 16 threads on 2 cores." in _run(checks["threads"])[1]


def test_a_processor_without_vector_instructions_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    for architecture, advice in (("x86_64", ["Unset ATEN_CPU_CAPABILITY."]), ("aarch64", [])):
        monkeypatch.setattr(machine.platform, "machine", lambda architecture=architecture: architecture)
        assert list(_run(machine.machine_checks()["instructions"])[1].values()) == advice


def test_gpus_are_named_and_each_model_has_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Card", major=9, minor=0, total_memory=3 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = _run(machine.machine_checks()["GPU"])[0]
    assert found.text.splitlines() == [f"{i}: Card, compute capability 9.0, 3.0 GiB" for i in (0, 1)]
    assert _run(machine.devices)[0].value["names"] == ["cpu", "cuda:0"]


@pytest.mark.parametrize(("cuda", "word"), [(None, "built for the CPU"), ("13.0", "CUDA_VISIBLE_DEVICES")])
def test_a_driver_without_a_gpu_for_torch_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, word: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    ((problem, advice),) = _run(machine.machine_checks()["GPU"])[1].items()
    assert word in problem + advice


# packages


def test_old_and_missing_packages_are_reported_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = importlib.metadata.version

    def pretend(name: str) -> str:
        if name in ("matplotlib", "jinja2"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.9.1+cpu" if name == "torch" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", pretend)
    found = examine()
    assert ("torch must be >=2.10; got 2.9.1+cpu.", "pip install --upgrade relpos") in found.problems
    plots = 'plots      missing: matplotlib, jinja2\n             pip install "relpos[plots]"\n'
    assert plots in found.to_text(80)
    extras = importlib.metadata.metadata("relpos").get_all("Provides-Extra")
    assert list(found.sections["packages"]) == ["always", *extras]
    assert sorted(found.sections["packages"]["demo"].value["includes"]) == ["plots", "translate"]


def test_versions_are_compared_by_number() -> None:
    for version, bounds in (("2.13.0+cpu", ">=2.10"), ("5.30.1", "<6, >=5.24"), ("1", ""), ("1", "==2.*")):
        assert packages.fits(version, bounds)
    for version, bounds in (("2.9.1", ">=2.10"), ("6.0", "<6,>=5.24"), ("5.3", "<6, >=5.24")):
        assert not packages.fits(version, bounds)


# kernels


def test_a_kernel_that_does_not_load_is_a_problem_and_others_serve(tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    path.write_bytes(b"no library")
    values = _doctor_as_json(RELPOS_CPU_KERNEL=str(path))
    kernel = values["compiled"]["CPU kernel"]
    assert (kernel["path"], kernel["built"], kernel["loads"]) == (str(path), True, False)
    advice = {problem["problem"]: problem["advice"] for problem in values["problems"]}
    found = advice["The CPU kernel does not load: attention on the CPU is slower."]
    assert found.startswith("Unset RELPOS_CPU_KERNEL, or set it to a kernel")
    for answer in values["attention"]["cpu"].values():
        assert answer["reasons"]["cpu"][0] == kernel["reason"]
        assert answer["chosen"] in ("merged", "dense")


def test_a_missing_kernel_is_a_problem_except_on_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RELPOS_CPU_KERNEL", raising=False)
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(cpu, "UNAVAILABLE", "was not built")
    ((problem, advice),) = _run(kernels.kernel_checks()["CPU kernel"])[1].items()
    assert problem == "The CPU kernel is missing: attention on the CPU is slower."
    assert advice.startswith("Install g++ or clang++, then run `pip install -v --no-deps -e ")
    monkeypatch.setattr(kernels.sys, "platform", "win32")
    assert _run(kernels.kernel_checks()["CPU kernel"])[1] == {}


@pytest.mark.parametrize("limit", ["baseline", "avx3"])
def test_a_kernel_that_loads_is_shown_with_its_instructions_and_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(cpu, "UNAVAILABLE", None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.setenv("RELPOS_CPU", limit)
    found, advice = _run(kernels.kernel_checks()["CPU kernel"])
    assert ("instructions avx2" in found.text) == (advice == {}) == (limit == "baseline")
    assert f"RELPOS_CPU={limit}" in found.text
    assert all("must be one of avx512, avx2, baseline; got 'avx3'" in problem for problem in advice)


ABSENT = "needs Triton, which does not import: No module named 'triton'"


@pytest.mark.parametrize(
    ("version", "cuda", "reason", "expected"),
    [
        ("3.7.1", None, "needs a build of torch for CUDA", []),
        ("3.7.1", "13.0", None, []),
        (None, "13.0", ABSENT, ['pip install "triton==3.7.1"']),
        ("3.7.1", "13.0", ABSENT, ['pip install --force-reinstall "triton==3.7.1"']),
        ("3.7.1", "13.0", triton.NO_LAUNCH, ["Install gcc or clang", "Install Python's headers"]),
    ],
)
def test_each_obstacle_to_compiling_gpu_kernels_has_its_own_advice(
    monkeypatch: pytest.MonkeyPatch, version: str, cuda: str, reason: str, expected: list[str]
) -> None:
    monkeypatch.setattr(triton, "UNAVAILABLE", reason)
    monkeypatch.setattr(triton, "IS_INTERPRETED", False)
    monkeypatch.setattr(triton, "missing_to_launch", lambda: ["a C compiler", "the headers of Python"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(kernels, "find_spec", lambda name: version and name)
    monkeypatch.setattr(kernels, "_triton_version", lambda: version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["filelock", "triton==3.7.1; os"])
    found, advice = _run(kernels.kernel_checks()["GPU kernels"])
    assert found.text == (f"none: {reason}" if reason else "compiled at their first call by Triton 3.7.1")
    assert found.value["available"] == (reason is None)
    assert len(advice) == len(expected)
    assert all(told.startswith(start) for told, start in zip(advice.values(), expected, strict=True))


def test_a_broken_triton_stops_neither_relpos_nor_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('its library\\nis missing; so it is')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # interpreted, so that it is imported whatever torch is built for
    values = _doctor_as_json(PYTHONPATH=path, TRITON_INTERPRET="1")
    reason = values["compiled"]["GPU kernels"]["reason"]
    assert reason.startswith("needs Triton, which does not import: its library")
    problems = " ".join(problem["problem"] for problem in values["problems"])
    assert "TRITON_INTERPRET is set" in problems
    assert "does not import" in problems
    assert all(reason in answer["reasons"]["triton"] for answer in values["attention"]["cpu"].values())


# torch alone: what the doctor may import is a contract in pyproject.toml

WITHOUT_TYPER = "import sys; sys.modules['typer'] = None; from relpos.cli import main; sys.exit(main())"


def test_without_typer_the_doctor_runs_and_other_commands_name_their_extra() -> None:
    assert list(_doctor_as_json("-c", WITHOUT_TYPER)) == [*SECTIONS, "problems"]
    command = [sys.executable, "-c", WITHOUT_TYPER, "train", "numbers", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert 'pip install "relpos[translate]". relpos doctor runs without them.' in done.stderr
