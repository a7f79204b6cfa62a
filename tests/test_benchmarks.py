"""The benchmarks run, and measure what they say; no test depends on a figure."""

import argparse
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
from types import ModuleType
from typing import Any

import pytest
import torch

from relpos import relative_attention
from relpos.backends import cpu, triton

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPTS = [
    "attention",
    "bounds",
    "busy_machine",
    "crossover",
    "gpu_conformance",
    "kernel_resources",
    "machine",
]
SCRIPTS += ["need_weights", "plot", "table", "training", "translator_step"]
FORMS = ["sdpa", "gather", "einsum", "cpu", "merged", "dense"]
SMALL = ["--turns", "1", "--threads", "1"]
SMALL_STEP = [*SMALL, "--tokens", "48", "--shortest", "5", "--longest", "8", "--vocabulary", "60"]
SMALL_STEP += ["--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "16"]
has_gpu = torch.version.cuda is not None and torch.cuda.is_available()
needs_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is limited on Linux only"
)

Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """A module of benchmarks/ by its name; their names are plain, and are forgotten after the test."""
    monkeypatch.syspath_prepend(FOLDER)
    names = {path.stem for path in FOLDER.glob("*.py")}
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


@pytest.fixture
def bounds(module: Module, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/bounds.py with small rows, of dense, which needs no kernel."""
    bounds, setting = module("bounds"), module("forms").Setting
    rows = [
        bounds.Row("short", setting(length=6), {"forward": 1e9, "both": 0.0}, form="dense"),
        bounds.Row("labels", setting(length=6, is_labelled=True), {"forward": None}, form="dense"),
        bounds.Row("memory", setting(length=256), {"forward": 64.0}, form="dense", is_memory=True),
    ]
    monkeypatch.setattr(bounds, "ROWS", rows)
    return bounds


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
@pytest.mark.parametrize(
    "changes",
    [{}, {"padding": 0.5}, {"queries": 3}, {"padding": 0.5, "is_masked": True}, {"is_labelled": True}],
    ids=["plain", "padded", "last-queries", "masked", "labelled"],
)
def test_every_form_computes_the_reference(
    module: Module, name: str, is_causal: bool, changes: dict[str, Any]
) -> None:
    forms = module("forms")
    setting = forms.Setting(19, 2, 3, 8, 4, "float64", is_causal=is_causal, has_backward=True, **changes)
    tensors = forms.make_tensors(setting)
    if reasons := forms.why_not(name, setting, tensors):
        pytest.skip("; ".join(reasons))
    wanted = forms.given(name, tensors)
    out = relative_attention(
        *wanted,
        *[None] * (5 - len(wanted)),
        key_lengths=tensors.key_lengths,
        is_causal=is_causal,
        query_start=19 - setting.num_queries,
        backend="reference",
    )
    expected = out, *torch.autograd.grad(out, wanted, tensors.grad_out)
    torch.testing.assert_close(forms.prepare(name, setting, tensors)(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_the_score_of_flex_attention_and_its_gradients_are_the_reference_without_rel_v(
    module: Module, is_causal: bool
) -> None:
    forms = module("forms")
    setting = forms.Setting(19, 2, 3, 8, 4, "float64", has_backward=True)
    tensors = forms.make_tensors(setting)
    query, key, value, rel_k = tensors[:4]
    index = [torch.arange(size).view([-1] + [1] * (3 - at)) for at, size in enumerate((2, 3, 19, 19))]
    # FlexAttention has no backward pass on a CPU; this is its documented formula
    change = forms.score_mod(forms.label_logits(query, rel_k), 4)
    logits = change(query @ key.mT / 8**0.5, *index)
    if is_causal:
        logits = logits.masked_fill(index[3] > index[2], float("-inf"))
    out = torch.softmax(logits, -1) @ value
    truth = relative_attention(*tensors[:4], None, max_distance=4, is_causal=is_causal, backend="reference")
    found, expected = (
        (x, *torch.autograd.grad(x, tensors[:4], tensors.grad_out, True)) for x in (out, truth)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["sdpa_flash", "sdpa_cudnn", "flex", "gather", "merged"])
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


def test_attention_records_every_form_in_one_format(module: Module, tmp_path: Path) -> None:
    path, options = tmp_path / "new" / "a.jsonl", ["--lengths", "96", "--pass", "both", "--heads", "1"]
    options += ["--device", "cpu", "--causal", "--padding", "0.25"]
    assert module("attention").main([*SMALL, *options, "--json", str(path)]) == 0
    records = {x["side"]: x for x in lines(path)}
    assert set(records) == set(FORMS)
    check_format(module, list(records.values()))
    for x in records.values():
        assert (x["pass"], x["length"], x["is_causal"], x["padding"]) == ("both", 96, True, 0.25)
        if x["side"] == "cpu" and cpu.UNAVAILABLE:
            continue
        assert (x["reason"], x["turns"], set(x["ratio_to"])) == (None, 1, {"sdpa"})
        assert min(x["seconds"], x["peak_mib"]) > 0
    # two gradients and two tensors of [96, 96, 64], not all at once
    assert records["gather"]["peak_mib"] > 2 * 96 * 96 * 64 * 4 / 2**20
    assert records["sdpa"]["ratio_to"] == {"sdpa": 1}


@needs_linux
def test_a_form_that_needs_too_much_memory_is_skipped(tmp_path: Path) -> None:
    # a process of its own: memory that tests before it freed could serve
    path = tmp_path / "a.jsonl"
    sizes = ["--lengths", "1024", "--pass", "forward", "--backends", "gather", "--memory-limit", "0.1"]
    command = [sys.executable, FOLDER / "attention.py", *SMALL, *sizes, "--heads", "1", "--no-memory"]
    done = subprocess.run([*command, "--device", "cpu", "--json", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = {x["side"]: x for x in lines(path)}
    assert records["sdpa"]["seconds"] > 0
    gather = records["gather"]
    assert (gather["seconds"], gather["turns"], gather["reason"]) == (None, 0, "needs more than 0.1 GiB")
    assert gather["is_failure"] is False


def test_a_backend_that_fails_is_recorded_and_makes_the_status_1(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(name: str, *given: Any, **rest: Any) -> Any:
        if name == "dense":
            raise RuntimeError("no kernel\nand much more")
        return module("forms").prepare(name, *given, **rest)

    monkeypatch.setattr(module("harness"), "prepare", fails)
    path, options = tmp_path / "a.jsonl", ["--lengths", "4", "--pass", "forward", "--no-memory"]
    options += ["--backends", "gather", "dense", "--device", "cpu"]
    assert module("attention").main([*SMALL, *options, "--json", str(path)]) == 1
    found = [(x["side"], x["reason"], x["is_failure"]) for x in lines(path)]
    assert found[1:] == [("gather", None, False), ("dense", "RuntimeError: no kernel", True)]


def test_a_form_that_breaks_the_gpu_is_left_out_when_the_run_goes_on(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attention, harness, path = module("attention"), module("harness"), tmp_path / "a.jsonl"
    cells = [(setting, ["sdpa_flash", "merged"]) for setting, _ in module("cells").cells(True)]
    monkeypatch.setattr(attention, "cells", lambda _: cells)
    arguments = ["--cells", "rehearsal", *SMALL, "--run", "one", "--json", str(path)]

    def breaks(name: str, *_: Any) -> None:
        if name == "merged":
            raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(harness, "check", breaks)
        patched.setattr(harness.Clock, "is_lost", lambda _: True)
        assert attention.main(arguments) == 3
    (broken,) = lines(path)
    assert (broken["side"], broken["is_failure"]) == ("merged", True)
    assert attention.main([*arguments, "--budget", "0"]) == 1
    assert len(lines(path)) == 1
    # the failure is known, and still counts
    assert attention.main(arguments) == 1
    found = [(x["side"], x["length"], x["pass"]) for x in lines(path)[1:]]
    assert found[:2] == [("sdpa_flash", 64, "forward"), ("sdpa_flash", 64, "both")]
    assert len(found) == 5


def test_turns_and_ratios(module: Module) -> None:
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

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, end: "Event") -> float:
            assert end is not self
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    clock = module("harness").Clock("cpu")
    clock.is_cuda = True
    clock.flushed = argparse.Namespace(zero_=lambda: happened.append("overwrite"))
    assert clock.turn(clock.warm(lambda: None))[0] == 0.0025
    happened.clear()
    assert clock.device(lambda: happened.append("call")) == 0.0025
    assert happened == ["overwrite", "overwrite", "event", "call", "event", "wait"]


# text, because it has to reach another process
WITHIN = "lambda: len(bytearray(64 << 20))"
BESIDE_INPUTS = "(lambda inputs: lambda: (inputs, bytearray(16 << 20)))(bytearray(64 << 20))"
# 32 MiB that a thread keeps from its first call on, as a kernel keeps its scratch
KEPT = "(lambda here: lambda: here.__dict__.setdefault('kept', bytearray(32 << 20)))"
KEPT += "(__import__('builtins').__dict__.setdefault('_here', __import__('threading').local()))"


@pytest.mark.parametrize(
    ("call", "mib"), [(WITHIN, 64), (BESIDE_INPUTS, 16), (KEPT, 32), ("lambda: None", 0)]
)
def test_peak_memory_is_beyond_the_inputs_and_has_what_a_thread_keeps(
    module: Module, call: str, mib: int
) -> None:
    make = partial(eval, call)
    assert module("peak_memory").peak_mib(make, limit=1 << 30, warm_up=make) == pytest.approx(mib, abs=2)


@needs_linux
def test_a_limit_on_memory_stops_a_call_that_needs_more_and_no_other(module: Module) -> None:
    memory = module("peak_memory")
    with pytest.raises(memory.OverLimit, match=r"needs more than 0\.25 GiB"), memory.limited(1 << 28):
        torch.ones(1 << 28)
    with pytest.raises(RuntimeError, match="shape"), memory.limited(1 << 28):
        torch.ones(2).view(3)
    assert torch.ones(1 << 25).sum() == 1 << 25
    with pytest.raises(ChildProcessError, match="ended with code 3"):
        memory.peak_mib(partial(eval, "lambda: __import__('os')._exit(3)"), limit=1 << 30)


def test_bounds_are_compared_and_known_rows_are_read(
    bounds: ModuleType, module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.jsonl"
    arguments = [*SMALL, "--json", str(path)]
    for _ in range(2):
        bounds.main(arguments)
        printed = capsys.readouterr().out.splitlines()
        assert [line.split(" | ")[-1] for line in printed[2:6]] == ["yes |", "no |", "- |", "yes |"]
        assert printed[-1] == "2 of 3 bounds are met"
    records = lines(path)
    check_format(module, records)
    assert len(records) == 8
    assert [x["side"] for x in records] == ["sdpa", "dense"] * 4
    # the logits [8, 256, 256] of dense, and not its output beside them
    assert 2 <= records[-1]["peak_mib"] < 20
    assert "| labels | forward | dense | sdpa |" in module("table").page(records)


@pytest.mark.parametrize("has_backward", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "dense"])
def test_outputs_that_memory_leaves_out_are_the_results_of_a_call(
    module: Module, name: str, has_backward: bool
) -> None:
    forms = module("forms")
    setting = forms.Setting(length=6, queries=2, batch=3, is_causal=True, has_backward=has_backward)
    num_bytes = sum(x.nbytes for x in forms.make_step(name, setting)())
    assert module("bounds").output_mib(name, setting) == num_bytes / 2**20


def test_every_bound_has_a_row_of_its_own(module: Module) -> None:
    rows = module("bounds").ROWS
    assert len({row.name for row in rows}) == len(rows)
    assert len({(row.setting, row.form, row.against, row.is_memory) for row in rows}) == len(rows)


def test_crossover_reports_cells_in_which_the_kernel_is_slower(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crossover, path = module("crossover"), tmp_path / "c.jsonl"
    small = {"dropout": [module("forms").Setting(length=8, batch=2, padding=0.5, dropout=0.1)]}
    monkeypatch.setattr(crossover, "grids", lambda: small)
    for _ in range(2):
        crossover.main([*SMALL, "--pass", "forward", "--slower", "0", "--json", str(path)])
    has_kernel = cpu.UNAVAILABLE is None
    records = lines(path)
    check_format(module, records)
    assert len(records) == (3 if has_kernel else 6)
    assert capsys.readouterr().out.count(f"in {int(has_kernel)} cells") == 2


def test_need_weights_measures_both_modules_in_every_pass(module: Module, tmp_path: Path) -> None:
    needs, path = module("need_weights"), tmp_path / "n.jsonl"
    needs.main([*SMALL, "--lengths", "8", "--json", str(path)])
    check_format(module, lines(path))
    assert [(x["pass"], x["side"]) for x in lines(path)] == [
        (name, side) for name in needs.PASSES for side in ("torch", "relpos")
    ]


def test_translator_step_compares_each_variant_with_the_first(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, path = module("translator_step"), tmp_path / "s.jsonl"
    monkeypatch.setattr(step, "keep_memory", lambda: None)
    step.main([*SMALL_STEP, "--json", str(path)])
    records = lines(path)
    check_format(module, records)
    assert [x["side"] for x in records] == list(step.VARIANTS)
    assert records[0]["ratio_to"] == {"sinusoidal, sdpa": 1}
    assert all(x["target_tokens"] == 48 for x in records)
    assert [x["side"] for x in records if x["is_met"] is not None] == ["relative, relpos"]


def test_variants_of_one_model_compute_the_same_by_different_attention(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, functional = module("translator_step"), torch.nn.functional
    options = step.make_options().parse_args(
        [*SMALL_STEP, *(f"--{x}=0" for x in ("dropout", "attention-dropout"))]
    )
    options.activation_dropout = 0.0
    batch, plain, calls = step.make_batch(48, 5, 8, 60), functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), plain(*a, **k))[1]
    )
    losses: dict[str, list[float]] = {}
    num_calls = {}
    for name, variant in list(step.VARIANTS.items())[:-1]:
        model = step.make_model(variant.positions, options).model
        calls.clear()
        with step.attending_by(variant.attention):
            losses.setdefault(variant.positions, []).append(model(**batch).loss.item())
        num_calls[name] = len(calls)
    assert all(values == pytest.approx([values[0]] * len(values), rel=1e-5) for values in losses.values())
    # an encoder's layer attends once, a decoder's twice
    wanted = {"sinusoidal, sdpa": 3, "relative, cross-attention by sdpa": 1, "relative, relpos": 0}
    assert wanted.items() <= num_calls.items()


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_training_benchmark_compares_three_models_in_the_precision_it_names(
    module: Module, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    training = module("training")
    monkeypatch.setitem(training.SIZES, "small", {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16})
    seen: dict[str, set[torch.dtype]] = {}
    make = training.make_models

    def watched(*arguments: Any) -> dict[str, Any]:
        models = make(*arguments)
        for kind, trained in models.items():
            linear = next(x for x in trained.model.modules() if isinstance(x, torch.nn.Linear))
            note = lambda _module, _inputs, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype)  # noqa: E731
            linear.register_forward_hook(note)
        return models

    monkeypatch.setattr(training, "make_models", watched)
    options = argparse.Namespace(tokens=96, vocabulary=60, turns=1, threads=1, seconds=9.0)
    records = training.measure("small", precision, options)
    check_format(module, records)
    assert [x["side"] for x in records] == ["relative", "sinusoidal", "marian"]
    assert all(x["target_tokens_per_second"] > 0 for x in records)
    assert seen == {kind: {dtype} for kind in ("relative", "sinusoidal", "marian")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_help_in_its_own_words(
    module: Module, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module(name).main(["--help"])
    assert stopped.value.code == 0
    assert module(name).__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("attention", ["--lengths", "0"], "argument --lengths: must be an integer of at least 1; got '0'"),
        (
            "attention",
            ["--dropout", "nan"],
            "argument --dropout: must be a number from 0 on and below 1; got 'nan'",
        ),
        ("attention", ["--memory-limit", "0"], "argument --memory-limit: must be above 0; got '0'"),
        ("attention", ["--json", str(FOLDER)], "argument --json: "),
        (
            "bounds",
            ["--rows", "absent"],
            "argument --rows: must be part of the name of a row; got ['absent'].",
        ),
        ("bounds", ["--json", __file__], "line 1 of "),
        (
            "plot",
            [str(ROOT / "benchmarks/results/bounds.jsonl"), "--out", "x.png"],
            "records must have one of",
        ),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    module: Module, capsys: pytest.CaptureFixture[str], name: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module(name).main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_old_results_are_read_and_give_the_page_of_the_documents(module: Module, tmp_path: Path) -> None:
    table, results = module("table"), FOLDER / "results"
    names = (
        "attention",
        "bounds",
        "busy_machine",
        "crossover",
        "need_weights",
        "training",
        "translator_step",
    )
    page = table.page(table.load([results / f"{name}.jsonl" for name in names]))
    for name in names[2:]:
        assert f"## {name}\n" in page
    numbers = re.compile(r"^\| (?:[\d,]+|n \d.*) \|.*", re.MULTILINE)
    documented = numbers.findall((ROOT / "docs" / "attention.md").read_text())
    assert len(documented) > 30
    assert set(documented) <= set(page.splitlines())
    module("plot").main([str(results / "attention.jsonl"), "--out", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run benchmarks/gpu_check.sh with this Python."""
    command, given = (
        ["bash", str(FOLDER / "gpu_check.sh"), *arguments],
        {"PYTHON": sys.executable, **environment},
    )
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)


def test_a_rehearsal_of_the_gpu_check_runs_everything_and_measures_nothing(
    module: Module, tmp_path: Path
) -> None:
    done = run_check("--rehearse", "--processes", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    suite, *measured = lines(tmp_path / "gpu-rehearsal.jsonl")
    here = {"sdpa_flash", "sdpa_cudnn", "gather", "merged", *(["triton"] if not triton.UNAVAILABLE else [])}
    for name in here & {"merged", "triton"}:
        assert suite["counts"][name] == {"passed": 3, "failed": 0, "skipped": 0}
    assert suite["is_passed"]
    check_format(module, measured)
    assert [x["side"] for x in measured] == list(module("cells").FORMS_ON_GPU) * 3
    assert all(x["rehearsal"] and x["run"] == suite["run"] for x in measured)
    for x in measured:
        is_flex_forward = x["side"] == "flex" and x["pass"] == "forward"
        assert (x["seconds"] is not None) == (x["side"] in here or is_flex_forward), x["reason"]
    page = (tmp_path / "gpu-rehearsal.md").read_text()
    assert page.count("| not measured | a rehearsal measures nothing |") == 8
    assert all(
        "REHEARSAL" in line
        for line in page.splitlines()
        if line.startswith(("# ", "## ")) and line != "## Aims"
    )
    assert (tmp_path / "gpu-rehearsal.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--budget", "4m"], {}, "--budget must be a whole number; got '4m'. See --help."),
        (["--suite"], {}, "--suite needs a value. See --help."),
        (["--fast"], {}, "there is no option '--fast'. See --help."),
        ([], {"PYTHON": "no-such-python"}, "PYTHON must be a Python; got 'no-such-python', which is none."),
        *([] if has_gpu else [([], {}, "an NVIDIA GPU ")]),
    ],
)
def test_the_gpu_check_refuses_wrong_use_and_a_machine_without_a_gpu(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = run_check(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


REPORT = """<testsuites><testsuite><testcase name="test_x[length 17-merged]"/>
<testcase name="test_x[triton-length 17]"/><testcase name="test_triton_is_there"/>
<testcase name="test_x[float32-triton-a]"><failure message="no">long</failure></testcase>
<testcase name="test_y[merged]"><skipped message="merged: has no dropout"/></testcase>
<testcase time="3"/></testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("report", "status", "reason"),
    [
        (REPORT, 1, "1 cases failed"),
        (REPORT.replace("failure", "x"), 0, None),
        (REPORT.replace("failure", "x"), 124, "time ran out"),
        (REPORT.replace("triton", "others"), 1, "1 cases failed; no case of triton passed"),
        (REPORT[:99], 0, "pytest ended with status 1; no case of merged passed; no case of triton passed"),
    ],
)
def test_the_suite_passes_only_if_all_cases_of_both_backends_ran_and_none_failed(
    module: Module, tmp_path: Path, report: str, status: int, reason: str | None
) -> None:
    (tmp_path / "r.xml").write_text(report)
    found = module("gpu_conformance").outcome(tmp_path / "r.xml", status)
    assert (found["reason"], found["is_passed"]) == (reason, reason is None)
    if report == REPORT:
        assert found["counts"]["merged"] == {"passed": 1, "failed": 0, "skipped": 1}


def gpu_run(module: Module, **changes: Any) -> list[dict[str, Any]]:
    """Records of a run on a GPU in which all aims are met; `changes` are of triton's at n 4096."""
    facts = {
        **module("machine").circumstances("cpu", 1),
        "run": "one",
        "capability": "9.0",
        "device_name": "H200",
    }
    records = [{**facts, "what": "conformance", "counts": {}, "is_passed": True, "reason": None}]
    for setting, _ in module("cells").cells(False):
        cell = {**facts, "what": "attention", "pass": "both" if setting.has_backward else "forward"}
        for side, ratio in (("sdpa_flash", 1.0), ("gather", 20.0), ("triton", 1.1)):
            to = {"sdpa_flash": ratio, "gather": ratio / 20}
            taken = {"seconds": ratio, "wall_seconds": 2 * ratio, "ratio_to": to, "peak_mib": 100.0}
            records.append({**cell, **asdict(setting), **module("records").EMPTY, **taken, "side": side})
            if side == "triton" and setting.length == 4096:
                records[-1] |= changes
    return records


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, ["met"] * 4),
        ({"ratio_to": {"sdpa_flash": 1.2, "gather": 0.2}}, ["missed", "met", "missed", "met"]),
        ({"peak_mib": 126.0}, ["met", "met", "met", "missed"]),
        ({"ratio_to": {}, "peak_mib": None}, ["not measured"] * 4),
    ],
)
def test_an_aim_is_met_if_every_cell_holds_and_the_suite_passed(
    module: Module, tmp_path: Path, changes: dict[str, Any], verdicts: list[str]
) -> None:
    records, aims = gpu_run(module, **changes), module("aims")
    assert [x[2] for x in aims.verdicts(records)] == [x for x in verdicts for _ in range(2)]
    assert "missed" in verdicts or "met" not in {x[2] for x in aims.verdicts(records[1:])}
    assert "met" not in {x[2] for x in aims.verdicts([x | {"capability": "8.0"} for x in records])}
    page = module("table").page(records)
    assert "### Time, device, forward and backward" in page
    assert "| 2,048 | 1 s | 20 s (20.00) | 1.1 s (1.10) |" in page
    module("plot").draw(module("table").group(x for x in records if x["what"] == "attention"))
