"""The benchmarks run, and measure what they say; no test depends on a figure."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from relpos import relative_attention
from relpos.backends.triton import backend as triton

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text())
FORMS = ["sdpa", "gather", "einsum", "cpu", "merged", "dense"]
GPU_FORMS = ["sdpa_flash", "sdpa_cudnn", "flex", "gather", "merged", "triton"]
MODEL = "--d-model=16 --layers=1 --heads=2 --d-ff=16 --tokens=48 --shortest=5 --longest=8 --vocabulary=60"
has_gpu = torch.version.cuda is not None and torch.cuda.is_available()

Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """A module of benchmarks/ by its name; the names are plain, so they are forgotten after the test."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr("relpos.cli.keep_memory", lambda: None)
    yield importlib.import_module
    for name in {path.stem for path in FOLDER.glob("*.py")} & sys.modules.keys():
        del sys.modules[name]


Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(module: Module, tmp_path: Path) -> Run:
    """Run a benchmark for one turn; its status, and the records of the file that it appends to."""

    def call(name: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
        path = tmp_path / "new" / f"{name}.jsonl"
        status = module(name).main(["--turns=1", "--threads=1", f"--json={path}", *options])
        return status or 0, lines(path)

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_format(module: Module, records: list[dict[str, Any]]) -> None:
    """Every record has the fields of a measurement and its circumstances, and can be shown."""
    fields = {"what", "side", *module("records").EMPTY, *module("machine").circumstances("cpu", 1)}
    for record in records:
        assert record.keys() >= fields
        assert record["reason"] or record["seconds"] or record["peak_mib"]
        assert record["side"] in module("table").show(record, ["side"])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("changes", ["", "padding", "queries", "padding is_masked", "is_labelled"])
def test_every_form_computes_the_reference(module: Module, name: str, is_causal: bool, changes: str) -> None:
    forms, values = module("forms"), {"padding": 0.5, "queries": 3, "is_masked": True, "is_labelled": True}
    given = {x: values[x] for x in changes.split()}
    setting = forms.Setting(19, 2, 3, 8, 4, "float64", is_causal=is_causal, has_backward=True, **given)
    tensors = forms.make_tensors(setting)
    if reasons := forms.why_not(name, setting, tensors):
        pytest.skip("; ".join(reasons))
    wanted = forms.given(name, tensors)
    options = {"key_lengths": tensors.key_lengths, "is_causal": is_causal, "query_start": setting.query_start}
    out = relative_attention(*wanted, *[None] * (5 - len(wanted)), **options, backend="reference")
    expected = out, *torch.autograd.grad(out, wanted, tensors.grad_out)
    torch.testing.assert_close(forms.prepare(name, setting, tensors)(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", GPU_FORMS[:5])
def test_a_form_with_a_wrong_result_fails_its_check(module: Module, form: str) -> None:
    forms, check = module("forms"), module("checks").check
    setting = replace(module("cells").cells(True)[-1][0], has_backward=form != "flex")
    tensors = forms.make_tensors(setting)
    found = forms.prepare(form, setting, tensors)()
    check(form, setting, tensors, found)
    with pytest.raises(ValueError, match=f"{form} computes something else: out is off by"):
        check(form, setting, tensors, (1.05 * found[0], *found[1:]))
    with pytest.raises(ValueError, match=f"{form} computes something else: .* is not finite"):
        check(form, setting, tensors, (*found[:-1], found[-1] * float("nan")))


SIDES = {
    "attention --lengths=8 --pass both --device=cpu --causal --padding=0.25": FORMS,
    "crossover --grids queries --tokens=16 --pass forward": ["cpu", "merged", "dense"] * 4,
    "need_weights --lengths 8": ["torch", "relpos"] * 4,
    f"translator_step {MODEL} --variants": ["sinusoidal, sdpa", "relative, relpos"],
}


@pytest.mark.parametrize("command", SIDES)
def test_each_benchmark_writes_one_format_for_each_side(module: Module, run: Run, command: str) -> None:
    options = [*command.split(), *(["relative, relpos"] if "variants" in command else [])]
    status, records = run(*options)
    check_format(module, records)
    assert (status, sorted(x["side"] for x in records)) == (0, sorted(SIDES[command]))
    assert any(x["ratio_to"] for x in records)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited on Linux only")
def test_a_form_that_needs_too_much_memory_is_skipped(tmp_path: Path) -> None:
    # a process of its own: memory that tests before it freed could serve
    path = tmp_path / "a.jsonl"
    options = "--lengths 1024 --pass forward --backends gather --memory-limit 0.1 --heads 1 --no-memory"
    command = [sys.executable, FOLDER / "attention.py", *options.split(), "--turns=1", "--threads=1"]
    done = subprocess.run([*command, "--device=cpu", "--json", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sdpa, gather = lines(path)
    assert sdpa["seconds"] > 0
    assert (gather["seconds"], gather["turns"], gather["reason"]) == (None, 0, "needs more than 0.1 GiB")


def test_a_form_that_breaks_the_gpu_is_left_out_when_the_run_goes_on(
    module: Module, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, settings = module("harness"), [x for x, _ in module("cells").cells(True)]
    names = ["sdpa_flash", "merged"]
    monkeypatch.setattr(module("attention"), "cells", lambda _: [(x, names) for x in settings[:2]])

    def breaks(name: str, *_: Any) -> None:
        if name == "merged":
            raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(harness, "check", breaks)
        patched.setattr(harness.Clock, "is_lost", lambda *_: True)
        status, records = run("attention", "--cells=rehearsal", "--run=one")
    assert (status, [(x["side"], x["is_failure"]) for x in records]) == (3, [("merged", True)])
    # the failure is known, and still counts; without time nothing else begins
    assert run("attention", "--cells=rehearsal", "--run=one", "--budget=0") == (1, records)
    status, records = run("attention", "--cells=rehearsal", "--run=one")
    assert (status, [x["side"] for x in records[1:]]) == (1, ["sdpa_flash", "sdpa_flash", "merged"])


def test_sides_take_turns_and_ratios_are_within_a_turn(module: Module) -> None:
    harness = module("harness")
    assert harness.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == (2.0, [1.25, 2.5])
    calls: list[str] = []
    ready = {name: harness.Ready(partial(calls.append, name), 1, 0.5) for name in "abc"}
    taken = harness.take_turns(ready, harness.Clock("cpu"), 20)
    turns = [tuple(calls[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 3
    assert harness.timing("a", taken, "b")["turns"] == 20
    wanted = {(15, 9.0): 6, (15, 0.1): 3, (2, 0.1): 2}
    assert {x: harness.num_turns(ready, harness.Plan(*x)) for x in wanted} == wanted


def test_a_gpu_is_timed_between_events_after_its_caches_are_overwritten(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    event = SimpleNamespace(record=lambda: happened.append("event"), elapsed_time=lambda end: 2.5)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    clock = module("harness").Clock("cpu")
    clock.is_cuda = True
    clock.flushed = SimpleNamespace(zero_=lambda: happened.append("overwrite"))
    assert clock.turn(clock.warm(lambda: None))[0] == 0.0025
    happened.clear()
    clock.device(lambda: happened.append("call"))
    assert happened == ["overwrite", "overwrite", "event", "call", "event", "wait"]


# text, because it has to reach another process
BESIDE_INPUTS = "(lambda inputs: lambda: (inputs, bytearray(16 << 20)))(bytearray(64 << 20))"
# 32 MiB that a thread keeps from its first call on, as a kernel keeps its scratch
KEPT = "(lambda here: lambda: here.__dict__.setdefault('kept', bytearray(32 << 20)))"
KEPT += "(__import__('builtins').__dict__.setdefault('_here', __import__('threading').local()))"


@pytest.mark.parametrize(("call", "mib"), [(BESIDE_INPUTS, 16), (KEPT, 32)])
def test_peak_memory_leaves_out_inputs_only(module: Module, call: str, mib: int) -> None:
    make = partial(eval, call)
    assert module("peak_memory").peak_mib(make, limit=1 << 30, warm_up=make) == pytest.approx(mib, abs=2)


def test_bounds_are_compared_and_known_rows_are_read(
    module: Module, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds, setting = module("bounds"), module("forms").Setting
    assert len({(x.setting, x.form, x.against, x.is_memory) for x in bounds.ROWS}) == len(bounds.ROWS)
    rows = [
        bounds.Row("short", setting(length=6), {"forward": 1e9, "both": 0.0}, form="dense"),
        bounds.Row("labels", setting(length=6, is_labelled=True), {"forward": None}, form="dense"),
        bounds.Row("memory", setting(length=256), {"both": 64.0}, form="dense", is_memory=True),
    ]
    monkeypatch.setattr(bounds, "ROWS", rows)
    for _ in range(2):
        _, records = run("bounds")
        printed = capsys.readouterr().out.splitlines()
        assert [line.split(" | ")[-1] for line in printed[2:6]] == ["yes |", "no |", "- |", "yes |"]
        assert printed[-1] == "2 of 3 bounds are met"
    check_format(module, records)
    assert [x["side"] for x in records] == ["sdpa", "dense"] * 4
    # logits [8, 256, 256] and their gradients; the outputs, of 2 MiB, are left out
    assert 2 <= records[-1]["peak_mib"] < 20
    memory = replace(rows[2].setting, has_backward=True)
    returned = sum(x.nbytes for x in module("forms").make_step("dense", memory)())
    assert bounds.output_mib("dense", memory) == returned / 2**20


def test_variants_of_the_translator_with_the_same_positions_compute_the_same(module: Module) -> None:
    step = module("translator_step")
    names = ("dropout", "attention-dropout", "activation-dropout")
    options = step.make_options().parse_args([*MODEL.split(), *(f"--{name}=0" for name in names)])
    losses: dict[str, list[float]] = {}
    for variant in list(step.VARIANTS.values())[:-1]:
        model, calls = step.make_model(variant.positions, options).model, []

        def counted(*given: Any, attention: Any = variant.attention, calls: list = calls, **more: Any) -> Any:
            calls.append(given)
            return attention(*given, **more)

        with step.attending_by(counted):
            loss = model(**step.make_batch(48, 5, 8, 60)).loss.item()
        # one of the encoder, two of the decoder
        assert len(calls) == 3
        losses.setdefault(variant.positions, []).append(loss)
    assert all(values == pytest.approx([values[0]] * len(values), rel=1e-5) for values in losses.values())


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_training_benchmark_compares_three_models_in_the_precision_it_names(
    module: Module, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    training, seen = module("training"), []
    monkeypatch.setitem(training.SIZES, "small", {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16})
    linear = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *x: seen.append(linear(*x)) or seen[-1])
    options = SimpleNamespace(tokens=48, vocabulary=60, turns=1, threads=1, seconds=9.0)
    records = training.measure("small", precision, options)
    check_format(module, records)
    assert [x["side"] for x in records] == ["relative", "sinusoidal", "marian"]
    assert {x.dtype for x in seen} == {dtype}


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_help(module: Module, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        module(name).main(["--help"])
    assert module(name).__doc__.splitlines()[0] in capsys.readouterr().out


WRONG = {
    "attention --lengths 0": "argument --lengths: must be an integer of at least 1; got '0'",
    "attention --dropout nan": "argument --dropout: must be a number from 0 on and below 1; got 'nan'",
    "bounds --rows absent": "argument --rows: must be part of the name of a row; got ['absent'].",
    f"bounds --json {__file__}": f"line 1 of {__file__} must be a record; got ",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_use_is_one_line(module: Module, capsys: pytest.CaptureFixture[str], command: str) -> None:
    name, *options = command.split()
    with pytest.raises(SystemExit, match="2"):
        module(name).main(options)
    assert WRONG[command] in capsys.readouterr().err.splitlines()[-1]


def test_old_results_are_read_and_give_the_page_of_the_documents(module: Module, tmp_path: Path) -> None:
    results, others = FOLDER / "results", ("busy_machine", "crossover", "need_weights", "training")
    names = ("attention", "bounds", "translator_step", *others)
    page = module("table").page(module("table").load([results / f"{name}.jsonl" for name in names]))
    assert all(f"## {name}\n" in page for name in names[2:])
    numbers = re.compile(r"^\| (?:[\d,]+|n \d.*) \|.*", re.MULTILINE)
    documented = numbers.findall((ROOT / "docs" / "attention.md").read_text())
    assert len(documented) > 30
    assert set(documented) <= set(page.splitlines())
    module("plot").main([str(results / "attention.jsonl"), "--out", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run benchmarks/gpu_check.sh with this Python."""
    around = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", str(FOLDER / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=around, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_rehearsal_of_the_gpu_check_measures_nothing(module: Module, tmp_path: Path) -> None:
    done = run_check("--rehearse", "--processes", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    suite, *measured = lines(tmp_path / "gpu-rehearsal.jsonl")
    here = {*GPU_FORMS} - {"flex", *(["triton"] if triton.UNAVAILABLE else [])}
    assert suite["is_passed"]
    for name in here & {"merged", "triton"}:
        assert suite["counts"][name] == {"passed": 3, "failed": 0, "skipped": 0}
    check_format(module, measured)
    assert [x["side"] for x in measured] == GPU_FORMS * 3
    assert all(x["seconds"] for x in measured if x["side"] in here)
    assert all(x["rehearsal"] and x["run"] == suite["run"] for x in measured)
    page = (tmp_path / "gpu-rehearsal.md").read_text()
    assert page.startswith("# REHEARSAL on a CPU, nothing here is a measurement")
    assert page.count("| not measured | a rehearsal measures nothing |") == 8
    assert (tmp_path / "gpu-rehearsal.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("given", ["--budget 4m", "--suite", "--fast", *([] if has_gpu else [""])])
def test_the_gpu_check_refuses_wrong_use_and_a_machine_without_a_gpu(given: str) -> None:
    done = run_check(*given.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert given.partition(" ")[0] in done.stderr


REPORT = """<testsuites><testsuite><testcase name="test_x[length 17-merged]"/>
<testcase name="test_x[triton-length 17]"/><testcase name="test_triton_is_there"/>
<testcase name="test_x[float32-triton-a]"><failure message="no">long</failure></testcase>
<testcase name="test_y[merged]"><skipped message="merged: has no dropout"/></testcase>
<testcase time="3"/></testsuite></testsuites>"""
PASSED = REPORT.replace("failure", "x")


CASES = [
    (REPORT, 1, "1 failed"),
    (PASSED, 0, None),
    (PASSED, 124, "time ran out"),
    (REPORT.replace("triton", "others"), 1, "1 failed; no case of triton passed"),
    (REPORT[:99], 0, "pytest ended with status 1; no case of merged passed; no case of triton passed"),
]


def test_the_suite_passes_if_both_backends_ran_and_none_failed(module: Module, tmp_path: Path) -> None:
    for report, status, reason in CASES:
        (tmp_path / "r.xml").write_text(report)
        found = module("gpu_conformance").outcome(tmp_path / "r.xml", status)
        assert (found["reason"], found["is_passed"]) == (reason, reason is None)
        assert report[:99] == report or found["counts"]["merged"] == {"passed": 1, "failed": 0, "skipped": 1}


AIMS = [
    ({}, ["met"] * 4),
    ({"ratio_to": {"sdpa_flash": 1.2, "gather": 0.2}}, ["missed", "met", "missed", "met"]),
    ({"peak_mib": 126.0}, ["met", "met", "met", "missed"]),
    ({"ratio_to": {}, "peak_mib": None}, ["not measured"] * 4),
]


@pytest.mark.parametrize(("changes", "verdicts"), AIMS)
def test_an_aim_is_met_if_every_cell_holds_and_the_suite_passed(
    module: Module, changes: dict[str, Any], verdicts: list[str]
) -> None:
    facts = {**module("machine").circumstances("cpu", 1), "run": "one", "capability": "9.0"}
    records = [{**facts, "what": "conformance", "counts": {}, "is_passed": True, "reason": None}]
    for setting, _ in module("cells").cells(False):
        cell = {**facts, "what": "attention", "pass": "both" if setting.has_backward else "forward"}
        for side, ratio in (("sdpa_flash", 1.0), ("gather", 20.0), ("triton", 1.1)):
            to = {"sdpa_flash": ratio, "gather": ratio / 20}
            taken = {"seconds": ratio, "wall_seconds": 2 * ratio, "ratio_to": to, "peak_mib": 100.0}
            records.append({**cell, **asdict(setting), **module("records").EMPTY, **taken, "side": side})
            if side == "triton" and setting.length == 4096:
                records[-1] |= changes

    def words(records: list[dict[str, Any]]) -> list[str]:
        return [x[2] for x in module("aims").verdicts(records)]

    assert words(records) == [x for x in verdicts for _ in range(2)]
    assert "met" not in words(records[1:]) + words([x | {"capability": "8.0"} for x in records])
    assert "| 2,048 | 1 s | 20 s (20.00) | 1.1 s (1.10) |" in module("table").page(records)


def test_two_checkouts_train_and_search_in_turns(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--d-model=16 --layers=1 --heads=2 --d-ff=16 --vocabulary=60 --batch=4"
    _, records = run("versions", str(ROOT), *sizes.split())
    tasks = ("train", "greedy", "beam 4", "one sentence")
    assert [(x["task"], x["side"]) for x in records] == [(x, y) for x in tasks for y in ("before", "after")]
    for record in records:
        assert record["seconds"] > 0
        assert (record["ratio_to"]["before"] == 1) is (record["side"] == "before")
    with pytest.raises(SystemExit, match="2"):
        run("versions", str(FOLDER))
    assert "no checkout of relpos" in capsys.readouterr().err
