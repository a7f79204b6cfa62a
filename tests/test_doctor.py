"""`relpos doctor`: its sections, the answers of `explain_backends`, its advice, and that torch alone is enough."""

import importlib.metadata
import io
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
from relpos._doctor import backends, examine, kernels, machine, openmp, packages, report, write_report
from relpos._doctor.check import NO_BREAK, Check, Result
from relpos.backends import cpu, triton
from relpos.backends.backend import Backend
from relpos.cli import run

SECTIONS = ["versions", "packages", "machine", "compiled", "attention"]
CPU = torch.device("cpu")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Run `relpos doctor` in a terminal of 80 columns, and return its output."""

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
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


def _problems() -> dict[str, str]:
    return {problem.problem: problem.advice for problem in examine().problems}


def _result(check: Check) -> tuple[Result, dict[str, str]]:
    """The result of one check, and the advice for each problem."""
    advice: dict[str, str] = {}
    return check(advice.__setitem__), advice


def _raise(*_: object) -> Any:
    raise RuntimeError("it is\nbroken")


def _without(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that packages have these versions, or are missing."""
    version = importlib.metadata.version

    def pretend(name: str) -> str:
        found = versions.get(name, "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found or version(name)

    monkeypatch.setattr(importlib.metadata, "version", pretend)


# output


def test_sections_come_in_order_and_fit_the_terminal(printed: Callable[[], str]) -> None:
    out = printed()
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == [*SECTIONS, "advice"]
    assert NO_BREAK not in out
    for known in (relpos.__version__, str(torch.__version__), torch.backends.cpu.get_cpu_capability()):
        assert known in out
    for line in out.splitlines():
        # a path or a command is never wrapped
        assert len(line) <= 80 or " " not in line.strip().removeprefix("from ")


def test_every_case_stands_above_its_table(printed: Callable[[], str]) -> None:
    text = " ".join(printed().partition("\nattention\n")[2].split())
    for name, case in backends.CASES.items():
        assert name in text
        assert " ".join(str(case.explain(CPU)).split()) in text[text.index(name) :]


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


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_processor_name", lambda: "Prozessor für alles")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_report(as_json=False)
    assert rb"Prozessor f\xfcr alles" in written.getvalue()


def test_without_problems_the_advice_says_so(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "run_check", lambda name, check, problems: Result({}, "fine"))
    assert printed().endswith("\nadvice\n  No problem found.\n")


# checks that fail


def test_a_check_that_raises_is_a_line_and_a_problem(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", _raise)
    # the list of devices and the check of GPUs
    monkeypatch.setattr(torch.cuda, "is_available", _raise)
    out = printed()
    for name in ("threads", "GPU"):
        assert re.search(rf"{name} +check failed \(RuntimeError: it is broken\)", out)
        assert f"- The check of {name} failed.\n    Report this output as a bug." in out
    assert ": chosen\n" in out


def test_a_case_that_raises_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*tensors: torch.Tensor, **options: Any) -> Any:
        return _raise() if "dropout_p" in options else explain_backends(*tensors, **options)

    monkeypatch.setattr(backends, "explain_backends", explain)
    found = examine()
    answers = found.sections["attention"]["cpu"].value
    assert answers["dropout"] == {"error": "RuntimeError: it is broken"}
    assert answers["causal"]["chosen"] is not None
    assert "The check of dropout on cpu failed." in [problem.problem for problem in found.problems]


def test_a_warning_is_reported_once(printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> bool:
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert printed().count("  - Warning: the driver is too old\n    Fix its cause.\n") == 1


def test_each_device_has_its_table_and_cases_without_a_backend_are_a_problem(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(inputs: Any) -> list[str]:
        return [f"not on {inputs.query.device}"] if inputs.query.device.type != "cpu" else []

    monkeypatch.setattr(report, "devices", lambda warn: Result({"names": ["cpu", "meta"]}, ""))
    monkeypatch.setattr(
        _dispatch, "BACKENDS", (Backend("local", why_not, lambda inputs: (inputs.query, None)),)
    )
    out = printed()
    assert re.search(r"\n  cpu   [^:]*\n +local: chosen\n", out)
    assert re.search(r"\n  meta  [^:]*\n +local: not on meta\n", out)
    assert "  - On meta no backend serves short sentences (64 x 32 tokens), 512 tokens," in out
    assert "On cpu no backend" not in out


# machine


@pytest.mark.parametrize(
    ("threads", "cores", "problem"),
    [
        (1, 16, "torch computes with 1 thread on 16 cores."),
        (8, 16, None),
        (1, 2, None),
        (64, 1, "torch computes with 64 threads on 1 core."),
    ],
)
def test_threads_that_do_not_suit_the_cores_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, problem: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    assert list(_result(machine.machine_checks()["threads"])[1]) == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("limit", "is_valid"),
    [("2", True), (" 1 ", True), ("2,4", True), ("", False), ("0", False), ("1.5", False), ("\u00b2", False)],
)
def test_a_thread_limit_that_torch_ignores_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, limit: str, is_valid: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    problem = f"OMP_NUM_THREADS must be a positive integer; got {limit!r}, which torch ignores."
    assert (problem in _result(machine.machine_checks()["threads"])[1]) != is_valid


def test_a_quota_of_its_container_limits_the_threads_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("RELPOS_CHOSEN", "GOMP_SPINCOUNT,OMP_NUM_THREADS")
    checks = machine.machine_checks()
    found, advice = _result(checks["threads"])
    assert advice == {}
    assert found.text.endswith("set by this command to fit the control group")
    assert "limited to 1.5 CPUs" in _result(checks["processor"])[0].text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert "torch computes with 16 threads on 2 cores." in _result(checks["threads"])[1]


@pytest.mark.parametrize(
    ("settings", "is_long"),
    [
        ({}, True),
        ({"GOMP_SPINCOUNT": "10000"}, False),
        ({"GOMP_SPINCOUNT": "infinite"}, True),
        ({"GOMP_SPINCOUNT": "300000"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"GOMP_SPINCOUNT": "10000", "RELPOS_CHOSEN": "GOMP_SPINCOUNT"}, False),
    ],
)
def test_how_threads_wait_is_told_and_is_a_problem_on_a_busy_machine_alone(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], is_long: bool
) -> None:
    for name in (*_relpos_command.WAITING, "RELPOS_CHOSEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(openmp, "_library", lambda: "libgomp")
    monkeypatch.setattr(openmp, "num_cores", lambda: 2)
    for load, is_busy in ((12.0, True), (1.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        found, advice = _result(openmp.check_waiting)
        assert all(f"{name}={settings[name]}" in found.text for name in settings if name != "RELPOS_CHOSEN")
        assert ("set by this command" in found.text) == ("RELPOS_CHOSEN" in settings)
        busy = "The machine is busy (6.0 tasks per core), and waiting threads spin for long."
        assert list(advice) == ([busy] if is_busy and is_long else [])


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux the doctor sees which OpenMP is loaded")
def test_the_openmp_that_torch_has_loaded_is_named() -> None:
    assert _result(openmp.check_waiting)[0].value["library"] in ("libgomp", "libiomp5", "libomp")


def test_without_proc_the_processor_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, **options: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    for name, answer in (("system", "Linux"), ("processor", ""), ("machine", "odd64")):
        monkeypatch.setattr(machine.platform, name, lambda answer=answer: answer)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(Path, "read_text", absent)
    assert _result(machine.machine_checks()["processor"])[0].text == "odd64, 2 cores for this process"


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_processor_without_vector_instructions_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: architecture)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    advice = {"torch uses no vector instructions.": "Unset ATEN_CPU_CAPABILITY."}
    found = _result(machine.machine_checks()["instructions"])[1]
    assert found == (advice if architecture == "x86_64" else {})


def test_gpus_are_named_and_each_model_has_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Card", major=9, minor=0, total_memory=3 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = _result(machine.machine_checks()["GPU"])[0]
    assert found.text.splitlines() == [f"{i}: Card, compute capability 9.0, 3.0 GiB" for i in (0, 1)]
    assert _result(machine.devices)[0].value["names"] == ["cpu", "cuda:0"]


@pytest.mark.parametrize(("cuda", "word"), [(None, "built for the CPU"), ("13.0", "CUDA_VISIBLE_DEVICES")])
def test_a_driver_without_a_gpu_for_torch_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, word: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    ((problem, advice),) = _result(machine.machine_checks()["GPU"])[1].items()
    assert word in problem + advice
    assert _result(machine.devices)[0].value["names"] == ["cpu"]


# packages


def test_an_old_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, torch="2.9.1+cpu")
    assert _problems()["torch must be >=2.10; got 2.9.1+cpu."] == "pip install --upgrade relpos"


def test_missing_packages_are_named_beside_the_extra_that_installs_them(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, matplotlib=None, jinja2=None)
    assert 'plots      missing: matplotlib, jinja2\n             pip install "relpos[plots]"\n' in printed()


def test_every_extra_of_the_distribution_is_listed() -> None:
    found = examine().sections["packages"]
    assert list(found) == ["always", *importlib.metadata.metadata("relpos").get_all("Provides-Extra")]
    assert found["always"].value["packages"]["torch"]["version"] == importlib.metadata.version("torch")
    assert "typer" in found["translate"].value["packages"]
    assert sorted(found["demo"].value["includes"]) == ["plots", "translate"]


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.10.0", ">=2.10", True),
        ("2.13.0+cpu", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("6.0", "<6,>=5.24", False),
        ("5.30.1", "<6, >=5.24", True),
        ("5.3", "<6, >=5.24", False),
        ("1", "", True),
        ("1", "==2.*", True),
    ],
)
def test_versions_are_compared_by_number(version: str, bounds: str, expected: bool) -> None:
    assert packages.fits(version, bounds) is expected


# kernels


@pytest.mark.parametrize(("content", "state"), [(None, "is missing"), (b"no library", "does not load")])
def test_a_kernel_that_does_not_load_is_a_problem_and_others_serve(
    tmp_path: Path, content: bytes | None, state: str
) -> None:
    path = tmp_path / "kernel.so"
    if content is not None:
        path.write_bytes(content)
    done = _doctor_as_json(RELPOS_CPU_KERNEL=str(path))
    kernel = done["compiled"]["CPU kernel"]
    assert kernel["path"] == str(path)
    assert (kernel["built"], kernel["loads"], kernel["instructions"]) == (content is not None, False, None)
    advice = {problem["problem"]: problem["advice"] for problem in done["problems"]}
    found = advice[f"The CPU kernel {state}: attention on the CPU is slower."]
    assert found.startswith("Unset RELPOS_CPU_KERNEL, or set it to a kernel")
    for answer in done["attention"]["cpu"].values():
        assert answer["reasons"]["cpu"][0] == kernel["reason"]
        assert answer["chosen"] in ("merged", "dense")


def _doctor_as_json(**environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "relpos", "doctor", "--json"]
    env = {**os.environ, **environment}
    return json.loads(
        subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=120, check=True).stdout
    )


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_a_missing_kernel_is_a_problem_except_on_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str
) -> None:
    monkeypatch.delenv("RELPOS_CPU_KERNEL", raising=False)
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(cpu, "UNAVAILABLE", "was not built")
    monkeypatch.setattr(kernels.sys, "platform", platform)
    found, advice = _result(kernels.kernel_checks()["CPU kernel"])
    if platform == "win32":
        assert (found.text, advice) == ("none for Windows", {})
    else:
        told = advice["The CPU kernel is missing: attention on the CPU is slower."]
        assert told.startswith("Install g++ or clang++, then run `pip install -v --no-deps -e ")


@pytest.mark.parametrize("limit", [None, "baseline", "avx3"])
def test_a_kernel_that_loads_is_shown_with_its_instructions_and_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    monkeypatch.setattr(cpu, "UNAVAILABLE", None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.delenv("RELPOS_CPU", raising=False)
    if limit is not None:
        monkeypatch.setenv("RELPOS_CPU", limit)
    found, advice = _result(kernels.kernel_checks()["CPU kernel"])
    assert ("instructions avx2" in found.text) == (list(advice.values()) == []) == (limit != "avx3")
    assert (f"RELPOS_CPU={limit}" in found.text) == (limit is not None)
    assert all("must be one of avx512, avx2, baseline; got 'avx3'" in problem for problem in advice)


ABSENT = "needs Triton, which does not import: No module named 'triton'"
NO_COMPILER = triton.NO_LAUNCH + "a C compiler"


@pytest.mark.parametrize(
    ("version", "cuda", "reason", "named", "expected"),
    [
        ("3.7.1", None, "needs a build of torch for CUDA", "", []),
        ("3.7.1", "13.0", None, "", []),
        (None, "13.0", ABSENT, "triton==3.7.1; platform_system", ['pip install "triton==3.7.1"']),
        (None, "13.0", ABSENT, "pytorch-triton (==3.9.0+git1)", ['pip install "pytorch-triton==3.9.0+git1"']),
        (None, "13.0", ABSENT, "triton-free>=1", ['pip install "triton"']),
        ("3.7.1", "13.0", ABSENT, "triton==3.7.1", ['pip install --force-reinstall "triton==3.7.1"']),
        ("3.7.1", "13.0", NO_COMPILER, "", ["Install gcc or clang", "Install Python's headers"]),
    ],
)
def test_what_keeps_triton_from_compiling_is_a_problem_with_its_own_advice(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    cuda: str | None,
    reason: str | None,
    named: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(triton, "UNAVAILABLE", reason)
    monkeypatch.setattr(triton, "IS_INTERPRETED", False)
    monkeypatch.setattr(triton, "missing_to_launch", lambda: ["a C compiler", "the headers of Python"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(kernels, "find_spec", lambda name: version and name)
    monkeypatch.setattr(kernels, "_triton_version", lambda: version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["filelock", named])
    found, advice = _result(kernels.kernel_checks()["GPU kernels"])
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
    for answer in values["attention"]["cpu"].values():
        assert reason in answer["reasons"]["triton"]


# torch alone


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command where relpos, torch and the packages that torch needs are installed, and no others."""
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

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        # -S leaves out the folder of installed packages; torch itself warns where NumPy is missing
        return subprocess.run(
            [sys.executable, "-S", "-W", "ignore:Failed to initialize NumPy:UserWarning", *arguments],
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return call


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in distribution.files or []}
    for top in tops - {"..", "__pycache__"}:
        if not top.startswith("__editable__") and top != "relpos" and not (site / top).exists():
            (site / top).symlink_to(distribution.locate_file(top))


def test_the_doctor_needs_torch_alone(alone: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = alone("-m", "relpos", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"always +torch \d", done.stdout)
    assert "missing: transformers, accelerate" in done.stdout
    assert 'pip install "relpos[translate]"' in done.stdout
    assert ": chosen\n" in done.stdout
    done = alone("-c", "import sys; from relpos.cli import main; sys.exit(main())", "doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"typer", "rich"} <= set(json.loads(done.stdout)["packages"]["translate"]["missing"])


def test_without_typer_other_commands_name_their_extra(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = alone("-m", "relpos", "train", "numbers", "--out", "run")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "No module named 'typer'" in done.stderr
    assert 'pip install "relpos[translate]". relpos doctor runs without them.' in done.stderr
