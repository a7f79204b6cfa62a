"""The benchmarks run, and measure what they say; their figures are nobody's test."""

import argparse
import importlib
import importlib.util
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from relpos import relative_attention
from relpos.backends import BACKENDS

FOLDER = Path(__file__).parents[1] / "benchmarks"
FORMS = ["sdpa", "gather", "einsum", *(backend.name for backend in BACKENDS if backend.name != "triton")]
FIELDS = {
    *("backend", "pass", "dtype", "batch", "heads", "length", "d_k", "max_distance"),
    *("is_causal", "padding", "dropout", "seconds", "ratio_to_sdpa", "ratio_quartiles", "peak_mib", "reason"),
    *(
        "turns",
        "threads",
        "device",
        "device_name",
        "machine",
        "torch",
        "commit",
        "kernel",
        "memory_limit_gib",
    ),
}
SMALL = ["--device", "cpu", "--threads", "1", "--turns", "2", "--heads", "1"]
needs_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is limited on Linux only"
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def run_attention(module: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., dict[str, dict]]:
    """Run benchmarks/attention.py and return its records by form."""

    def run(*arguments: str) -> dict[str, dict]:
        path = tmp_path / "results" / "attention.jsonl"
        module("attention").main([*SMALL, *arguments, "--json", str(path)])
        return {x["backend"]: x for x in map(json.loads, path.read_text().splitlines())}

    return run


@pytest.fixture
def training(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/training.py as a module, with one small size."""
    training = module("training")
    monkeypatch.setitem(training.SIZES, "small", {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16})
    return training


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_training_benchmark_compares_three_models_in_the_precision_it_names(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    seen: dict[str, set[torch.dtype]] = {}
    make = training._models

    def watched(*arguments: object) -> dict[str, torch.nn.Module]:
        models = make(*arguments)
        for kind, model in models.items():
            linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
            linear.register_forward_hook(
                lambda _module, _inputs, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype)
            )
        return models

    monkeypatch.setattr(training, "_models", watched)
    options = argparse.Namespace(tokens=256, vocabulary=400, longest=2, turns=1, threads=1)
    record = training.measure("small", precision, options)
    assert set(record["target_tokens_per_second"]) == {"relative", "sinusoidal", "marian"}
    assert record["relative_to_marian"] > 0
    assert all(dtypes == {dtype} for dtypes in seen.values())
    assert "marian" in seen


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("padding", [0.0, 0.5], ids=["full", "padded"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"queries": 3}, {"is_masked": True}, {"is_labelled": True}],
    ids=["plain", "last-queries", "masked", "labelled"],
)
def test_every_form_of_attention_computes_the_reference(
    module: Callable[[str], ModuleType],
    name: str,
    is_causal: bool,
    padding: float,
    changes: dict[str, Any],
) -> None:
    forms = module("attention_forms")
    setting = forms.Setting(
        **changes,
        length=19,
        batch=2,
        heads=3,
        d_k=8,
        max_distance=4,
        dtype="float64",
        is_causal=is_causal,
        padding=padding,
        has_backward=True,
    )
    tensors = forms.make_tensors(setting)
    if reasons := forms.why_not(name, setting, tensors):
        pytest.skip("; ".join(reasons))
    wanted = tensors[:3] if name == "sdpa" else tensors[:5]
    out = relative_attention(
        *tensors[:3],
        *((None, None) if name == "sdpa" else tensors[3:5]),
        key_lengths=torch.tensor([10, 10]) if padding else None,
        is_causal=is_causal,
        query_start=19 - setting.num_queries,
        backend="reference",
    )
    expected = out, *torch.autograd.grad(out, wanted, tensors.grad_out)
    torch.testing.assert_close(forms.prepare(name, setting, tensors)(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FORMS)
def test_a_forward_pass_keeps_its_dtype_and_no_graph(module: Callable[[str], ModuleType], name: str) -> None:
    forms = module("attention_forms")
    setting = forms.Setting(length=12, dtype="bfloat16")
    if reasons := forms.why_not(name, setting, forms.make_tensors(setting)):
        pytest.skip("; ".join(reasons))
    (out,) = forms.make_step(name, setting)()
    assert out.dtype == torch.bfloat16
    assert not out.requires_grad


@pytest.mark.parametrize("name", ["sdpa", "gather", "einsum", "dense"])
def test_forms_drop_weights_where_asked(module: Callable[[str], ModuleType], name: str) -> None:
    forms = module("attention_forms")
    step = forms.make_step(name, forms.Setting(length=12, dropout=0.5))
    assert not torch.equal(step()[0], step()[0])


def test_attention_benchmark_records_every_form(
    run_attention: Callable[..., dict[str, dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    records = run_attention("--lengths", "96", "--pass", "both", "--causal", "--padding", "0.25")
    assert list(records) == FORMS
    for record in records.values():
        assert set(record) == FIELDS
        assert (record["pass"], record["length"]) == ("both", 96)
        assert (record["is_causal"], record["padding"]) == (True, 0.25)
        if record["backend"] == "cpu" and record["kernel"] is None:
            assert "was not built" in record["reason"]
            continue
        assert (record["reason"], record["turns"]) == (None, 2)
        assert record["seconds"] > 0
        assert record["peak_mib"] > 0
    # two gradients and two tensors of [96, 96, 64], not all at once
    assert records["gather"]["peak_mib"] > 2 * 96 * 96 * 64 * 4 / 2**20
    assert records["sdpa"]["ratio_to_sdpa"] == 1
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["form", *FORMS]
    assert "length 96, both: gather" in printed.err


@needs_linux
@pytest.mark.parametrize("memory", [[], ["--no-memory"]], ids=["measured", "unmeasured"])
def test_a_form_that_needs_too_much_memory_is_skipped(tmp_path: Path, memory: list[str]) -> None:
    # a process of its own: what tests before it have freed could serve in place of new memory
    sizes = ["--lengths", "1024", "--pass", "forward", "--backends", "gather", "--memory-limit", "0.1"]
    path, script = tmp_path / "records.jsonl", Path(__file__).parents[1] / "benchmarks" / "attention.py"
    command = [sys.executable, str(script), *SMALL, *sizes, *memory, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = {x["backend"]: x for x in map(json.loads, path.read_text().splitlines())}
    assert records["sdpa"]["seconds"] > 0
    assert (records["sdpa"]["peak_mib"] is None) == bool(memory)
    assert [records["gather"][x] for x in ("seconds", "ratio_to_sdpa", "peak_mib", "turns")] == [None] * 3 + [
        0
    ]
    assert records["gather"]["reason"] == "needs more than 0.1 GiB"
    assert "skipped: needs more than 0.1 GiB" in done.stdout


@needs_linux
def test_the_bound_on_memory_ends_with_its_block(module: Callable[[str], ModuleType]) -> None:
    peak_memory, before = module("peak_memory"), resource.getrlimit(resource.RLIMIT_DATA)
    with peak_memory.limited(1 << 28):
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_backend_that_cannot_run_is_skipped_with_its_reasons(
    module: Callable[[str], ModuleType],
    run_attention: Callable[..., dict[str, dict]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = lambda name, *_: ["too long", "too wide"] if name == "dense" else []  # noqa: E731
    monkeypatch.setattr(module("measuring"), "why_not", refuses)
    records = run_attention("--lengths", "4", "--pass", "forward", "--backends", "dense", "--no-memory")
    assert records["dense"]["reason"] == "too long; too wide"
    assert records["dense"]["seconds"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "argument --lengths: must be an integer of at least 1; got '0'"),
        (["--padding", "1"], "argument --padding: must be a number from 0 on and below 1; got '1'"),
        (["--dropout", "nan"], "argument --dropout: must be a number from 0 on and below 1; got 'nan'"),
        (["--backends", "fast"], "argument --backends: invalid choice: 'fast'"),
        (["--memory-limit", "0"], "argument --memory-limit: must be above 0; got '0'"),
        (["--memory-limit", "-1"], "argument --memory-limit: must be a number of at least 0; got '-1'"),
        (["--json", str(FOLDER)], "argument --json: "),
    ],
)
def test_attention_benchmark_refuses_wrong_use_in_one_line(
    module: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module("attention").main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_records_that_cannot_be_written_end_the_attention_benchmark_in_one_line(
    module: Callable[[str], ModuleType],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module("attention").main(
            [*SMALL, "--lengths", "4", "--pass", "forward", "--backends", "sdpa", "--json", "/dev/full"]
        )
    # a string is printed on standard error, and the code is 1
    assert stopped.value.code == "error: argument --json: /dev/full: No space left on device"


def test_a_form_or_a_pass_given_twice_is_taken_once(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "attention.jsonl"
    twice = ["--lengths", "4", "--pass", "forward", "forward", "--backends", "gather", "sdpa", "gather"]
    module("attention").main([*SMALL, *twice, "--no-memory", "--json", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["backend"], record["pass"]) for record in records] == [
        ("sdpa", "forward"),
        ("gather", "forward"),
    ]


def test_ratios_are_taken_within_a_turn_and_every_form_runs_once_a_turn(
    module: Callable[[str], ModuleType],
) -> None:
    timing = module("attention")._timing([2.0, 9.0, 4.0], [1.0, 3.0, 8.0])
    assert (timing["seconds"], timing["ratio_to_sdpa"]) == (4.0, 2.0)
    measuring = module("measuring")
    assert measuring.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == {"ratio": 2.0, "ratio_quartiles": [1.25, 2.5]}
    calls: list[str] = []
    runners = {name: measuring.Runner(partial(calls.append, name), 1, 0.5) for name in "abc"}
    seconds = measuring.take_turns(runners, "cpu", 20)
    turns = [tuple(calls[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 3
    assert {len(taken) for taken in seconds.values()} == {20}
    assert measuring.num_turns(runners, measuring.Plan(turns=15, seconds=9.0)) == 6
    assert measuring.num_turns(runners, measuring.Plan(turns=15, seconds=0.1)) == 3
    assert measuring.num_turns(runners, measuring.Plan(turns=2, seconds=0.1)) == 2


# text, because it has to reach another process
WITHIN = "lambda: len(bytearray(64 << 20))"
BESIDE_INPUTS = "(lambda inputs: lambda: (inputs, bytearray(16 << 20)))(bytearray(64 << 20))"


@pytest.mark.parametrize(("call", "mib"), [(WITHIN, 64), (BESIDE_INPUTS, 16), ("lambda: None", 0)])
def test_peak_memory_sees_what_is_freed_again_and_not_what_was_there(
    module: Callable[[str], ModuleType], call: str, mib: int
) -> None:
    peak = module("peak_memory").peak_mib(partial(eval, call), limit=1 << 30)
    assert peak == pytest.approx(mib, abs=2)


# 32 MiB that a thread keeps from its first call on, as a kernel keeps its scratch
KEPT = "(lambda here: lambda: here.__dict__.setdefault('kept', bytearray(32 << 20)))"
KEPT += "(__import__('builtins').__dict__.setdefault('_here', __import__('threading').local()))"


def test_peak_memory_counts_what_a_thread_keeps_from_the_warm_up(module: Callable[[str], ModuleType]) -> None:
    call = partial(eval, KEPT)
    peak = module("peak_memory").peak_mib(call, limit=1 << 30, warm_up=call)
    assert peak == pytest.approx(32, abs=2)


def test_peak_memory_passes_on_how_a_call_failed(module: Callable[[str], ModuleType]) -> None:
    memory = module("peak_memory")
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        memory.peak_mib(partial(eval, "lambda: 1 / 0"), limit=1 << 30)
    with pytest.raises(ChildProcessError, match="ended with code 3"):
        memory.peak_mib(partial(eval, "lambda: __import__('os')._exit(3)"), limit=1 << 30)


@needs_linux
def test_a_limit_on_memory_stops_what_needs_more_and_nothing_else(
    module: Callable[[str], ModuleType],
) -> None:
    memory = module("peak_memory")
    with pytest.raises(memory.OverLimit, match=r"needs more than 0\.25 GiB"), memory.limited(1 << 28):
        torch.ones(1 << 28)
    with pytest.raises(RuntimeError, match="shape"), memory.limited(1 << 28):
        torch.ones(2).view(3)
    assert torch.ones(1 << 25).sum() == 1 << 25


def record(**changes: Any) -> str:
    """A line of JSON as attention.py writes it."""
    plain = {
        **dict.fromkeys(FIELDS),
        **{"backend": "sdpa", "pass": "forward", "dtype": "float32", "batch": 1, "heads": 8, "length": 64},
        **{"d_k": 64, "max_distance": 16, "is_causal": False, "padding": 0.0, "dropout": 0.0, "threads": 1},
        **{"device": "cpu", "device_name": "A Processor", "torch": "2.13.0", "commit": "abc1234"},
        **{"seconds": 0.002, "ratio_to_sdpa": 1.0, "peak_mib": 0.5},
    }
    return json.dumps({**plain, **changes})


def test_picture_and_page_show_the_records(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    skipped = {"seconds": None, "ratio_to_sdpa": None, "peak_mib": None, "reason": "needs more than 8 GiB"}
    lines = [
        record(seconds=0.001),
        record(),
        record(length=4096, peak_mib=2048.0),
        record(backend="gather", seconds=0.0131, ratio_to_sdpa=6.543),
        record(backend="gather", length=4096, **skipped),
        record(backend="new", **{"pass": "both"}),
        record(padding=0.5, is_causal=True, threads=2),
    ]
    records, plot, page = tmp_path / "a.jsonl", tmp_path / "docs" / "a.png", tmp_path / "a.md"
    records.write_text("\n".join(lines))
    module("plot_attention").main([str(records), "--plot", str(plot), "--table", str(page)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "![Time and memory against length](docs/a.png)" in text
    assert "| 64 | 2 ms | 13.1 ms (6.54) |\n| 4,096 | 2 ms | - |" in text
    assert "| 64 | 512 KiB | 512 KiB |\n| 4,096 | 2 GiB | - |" in text
    assert "### Time, forward and backward\n\n| length | new |\n| --: | --: |\n| 64 | 2 ms (1.00) |" in text
    assert "- gather, forward, at 4,096: needs more than 8 GiB" in text
    assert "## A Processor, 2 threads, float32, batch 1, 8 heads of 64, k = 16, causal, 50% padding" in text


def test_picture_has_a_line_for_each_form_in_each_panel(module: Callable[[str], ModuleType]) -> None:
    lines = [record(backend=name, length=n) for name in ("dense", "sdpa") for n in (64, 128)]
    lines += [record(backend="dense", length=256, **{"pass": "both"})]
    (records,) = module("plot_attention").group(lines)
    figure = module("plot_attention").draw(records)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "time of one call, forward",
        "time of one call, forward and backward",
        "peak memory beyond inputs, forward",
        "peak memory beyond inputs, forward and backward",
    ]
    for column, lengths in enumerate([[[64, 128], [64, 128]], [[256]]]):
        for axes in figure.axes[column::2]:
            assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
            assert [list(line.get_xdata()) for line in axes.get_lines()] == lengths
            assert list(axes.get_xticks()) == [64, 128, 256]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["scaled_dot_product_attention, no positions", "relpos: dense"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 1 of the records must be one of attention.py; got '{}'"),
        ("", "records must have at least one line; got none"),
    ],
)
def test_picture_refuses_what_is_no_record(
    module: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    records = tmp_path / "a.jsonl"
    records.write_text(text)
    with pytest.raises(SystemExit):
        module("plot_attention").main([str(records), "--table", str(tmp_path / "a.md")])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_need_weights_measures_both_modules_in_every_pass(
    module: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = module("need_weights")
    path = tmp_path / "x.jsonl"
    needs.main(["--lengths", "8", "--threads", "1", "--turns", "2", "--json", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["pass"] for record in records] == list(needs.PASSES)
    assert all(min(record["seconds"].values()) > 0 and record["ratio"] > 0 for record in records)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(needs.PASSES)
