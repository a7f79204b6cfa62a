"""The GPU benchmark measures what it says, times nothing that is wrong, and records what fails."""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from relpos import relative_attention

FOLDER = Path(__file__).parents[1] / "benchmarks"
SIDES = ["sdpa_flash", "sdpa_cudnn", "flex", "gather", "merged", "triton"]
has_gpu = torch.version.cuda is not None and torch.cuda.is_available()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.skipif(has_gpu, reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["gpu_device.py", "gpu_attention.py", "gpu_conformance.py"])
def test_without_a_gpu_each_program_ends_with_one_sentence_and_status_2(
    module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module(name.removesuffix(".py")).main([])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: an NVIDIA GPU ")
    assert "--rehearse" in line


def test_operations_are_counted_alike_for_all_sides(module: Callable[[str], ModuleType]) -> None:
    setting = module("attention_forms").Setting(length=4, batch=3, heads=5, d_k=7)
    num_flop = module("gpu_forms").num_flop
    # two products of [4, 7] and [7, 4] in 15 heads, two operations for each number
    assert num_flop(setting) == 2 * 15 * (2 * 4 * 4 * 7)
    assert num_flop(replace(setting, has_backward=True)) == 3.5 * num_flop(setting)
    assert num_flop(replace(setting, is_causal=True)) == num_flop(setting) / 2


def test_the_cells_that_the_aims_name_come_first_and_all_hold_as_many_tokens(
    module: Callable[[str], ModuleType],
) -> None:
    cells = module("gpu_cells").cells(False)
    assert len(set(cells)) == len(cells) == 4 * 6 * 4
    assert {x.batch * x.length for x in cells} == {16_384}
    assert {x.heads * x.d_k for x in cells} == {1024}
    assert {(x.dtype, x.device) for x in cells} == {("bfloat16", "cuda")}
    aimed = [x for x in cells if (x.d_k, x.max_distance) == (64, 16)]
    assert cells[: len(aimed)] == aimed
    assert [x.length for x in aimed[:16:4]] == [4096, 2048, 16_384, 8192]


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_the_score_of_flex_attention_and_its_gradients_are_the_reference_without_values(
    module: Callable[[str], ModuleType], is_causal: bool
) -> None:
    forms = module("gpu_forms")
    setting = module("attention_forms").Setting(
        length=19, batch=2, heads=3, d_k=8, max_distance=4, dtype="float64", has_backward=True
    )
    tensors = module("attention_forms").make_tensors(setting)
    query, key, value, rel_k = tensors[:4]
    index = [torch.arange(size).view([-1] + [1] * (3 - at)) for at, size in enumerate((2, 3, 19, 19))]
    # FlexAttention has no backward pass on a CPU; this is what its pages say that it computes
    change = forms.score_mod(forms.label_logits(query, rel_k), 4)
    logits = change(query @ key.mT / math.sqrt(8), *index)
    if is_causal:
        logits = logits.masked_fill(index[3] > index[2], -math.inf)
    out = torch.softmax(logits, -1) @ value
    truth = relative_attention(*tensors[:4], None, max_distance=4, is_causal=is_causal, backend="reference")
    found, expected = (
        (x, *torch.autograd.grad(x, tensors[:4], tensors.grad_out, retain_graph=True)) for x in (out, truth)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", SIDES[:5])
def test_a_side_that_computes_something_else_is_not_timed(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    forms = module("gpu_forms")
    setting = module("gpu_cells").cells(True)[-1]
    setting = replace(setting, has_backward=side != "flex")
    tensors = module("attention_forms").make_tensors(setting)
    found = forms.make_step(side, setting, tensors)()
    forms.check_small(side, setting)
    forms.check_sample(side, setting, tensors, found)
    with pytest.raises(ValueError, match=f"{side} computes something else: out is off by"):
        forms.check_sample(side, setting, tensors, (1.05 * found[0], *found[1:]))
    with pytest.raises(ValueError, match=f"{side} computes something else: .* is not finite at full size"):
        forms.check_sample(side, setting, tensors, (*found[:-1], found[-1] * math.nan))
    forms._check_once.cache_clear()
    make = forms.make_step
    wrong = lambda *given, **rest: lambda: (*make(*given, **rest)()[:-1], torch.zeros(()))  # noqa: E731
    monkeypatch.setattr(forms, "make_step", wrong)
    with pytest.raises(ValueError, match=f"{side} computes something else"):
        forms.check_small(side, setting)
    forms._check_once.cache_clear()


def test_flex_attention_with_labels_one_off_is_found_out(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = module("gpu_forms")
    setting = module("gpu_cells").cells(True)[0]
    right = forms.score_mod

    def one_off(logits: torch.Tensor, max_distance: int) -> Callable[..., torch.Tensor]:
        change = right(logits, max_distance)
        return lambda score, batch, head, i, j: change(score, batch, head, i, j + 1)

    monkeypatch.setattr(forms, "score_mod", one_off)
    forms._check_once.cache_clear()
    with pytest.raises(ValueError, match="flex computes something else: out is off by"):
        forms.check_small("flex", setting)


@pytest.fixture
def attention(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_attention.py with two small cells, and two sides that need no GPU."""
    attention = module("gpu_attention")
    monkeypatch.setattr(attention, "SIDES", ("sdpa_flash", "merged"))
    monkeypatch.setattr(attention, "cells", lambda _: module("gpu_cells").cells(True)[:2])
    return attention


def run_attention(attention: ModuleType, path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The status of a rehearsal named "one", and all records of the file."""
    status = attention.main(["--rehearse", "--run", "one", "--json", str(path), *arguments])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_cells_beyond_the_budget_are_named(
    attention: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, records = run_attention(attention, tmp_path / "a.jsonl", "--budget", "0")
    names = ["d 16, k 4, n 64, forward", "d 16, k 4, n 64, both"]
    assert (status, len(records)) == (0, 1)
    assert [records[0][x] for x in ("what", "budget", "cells", "rehearsal")] == ["left out", 0, names, True]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "The budget of 0 s was spent before 2 cells:",
        *names,
    ]


def test_what_compiles_anew_for_each_shape_may_take_a_share_of_the_budget(
    module: Callable[[str], ModuleType],
) -> None:
    budget = module("gpu_cells").Budget(100.0)
    assert not budget.is_spent()
    budget.compiling["flex"] += 34
    assert budget.why_not("flex") == []
    budget.compiling["flex"] += 2
    assert budget.why_not("flex") == ["left out: it has compiled for 36 s, the budget's share for that"]
    assert budget.why_not("triton") == []


def test_a_failure_of_ours_is_recorded_and_makes_the_status_1(
    attention: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, *_: Any) -> None:
        if name == "merged":
            raise RuntimeError("no kernel\nand much more")

    monkeypatch.setattr(attention, "check_small", fails)
    status, records = run_attention(attention, tmp_path / "a.jsonl")
    assert status == 1
    assert [(x["side"], x["is_failure"]) for x in records] == [("sdpa_flash", False), ("merged", True)] * 2
    assert {x["reason"] for x in records} == {None, "RuntimeError: no kernel"}
    assert all(x["seconds"] > 0 for x in records if x["side"] == "sdpa_flash")


def test_ours_that_is_right_on_few_tokens_and_wrong_at_full_size_is_not_timed(
    attention: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = attention.make_step

    def wrong(name: str, *given: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: tuple((1.1 if name == "merged" else 1.0) * x for x in make(name, *given)())

    monkeypatch.setattr(attention, "make_step", wrong)
    status, records = run_attention(attention, tmp_path / "a.jsonl")
    assert status == 1
    for x in records:
        assert (x["side"] == "merged") == (x["seconds"] is None)
        if x["side"] == "merged":
            assert x["reason"].startswith("ValueError: merged computes something else: out is off by 0.1 of")


def test_a_side_that_breaks_the_device_is_left_out_when_the_run_goes_on(
    attention: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    is_broken = False

    def breaks(name: str, *_: Any) -> None:
        nonlocal is_broken
        if name == "merged":
            is_broken = True
            raise RuntimeError("an illegal memory access was encountered")

    def answers(_: Any) -> None:
        if is_broken:
            raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(attention, "check_small", breaks)
        patched.setattr(attention.Clock, "wait", answers)
        status, records = run_attention(attention, path)
    assert status == 3
    assert [(x["side"], x["reason"]) for x in records] == [
        ("merged", "RuntimeError: an illegal memory access was encountered")
    ]
    # a new process: the failure is known, and still counts
    status, records = run_attention(attention, path)
    assert status == 1
    assert [(x["side"], x["pass"], x["seconds"] is not None) for x in records] == [
        ("merged", "forward", False),
        ("sdpa_flash", "forward", True),
        ("sdpa_flash", "both", True),
        ("merged", "both", True),
    ]


def test_sides_that_fail_in_their_turns_are_recorded(
    attention: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(attention, "take_turns", fails)
    status, records = run_attention(attention, tmp_path / "a.jsonl")
    assert status == 1
    assert {x["reason"] for x in records} == {"in turns with the others: RuntimeError: launch failed"}


def test_a_call_is_timed_between_events_after_the_caches_are_overwritten(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
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
    clock = module("gpu_timing").Clock("cpu")
    clock.is_cuda = True
    clock.flushed = SimpleNamespace(zero_=lambda: happened.append("overwrite"))
    assert clock.device_seconds(lambda: happened.append("call")) == 0.0025
    assert happened == ["overwrite", "overwrite", "event", "call", "event", "wait"]
    happened.clear()
    assert clock.wall_seconds(lambda: happened.append("call")) >= 0
    assert happened == ["wait", "call", "wait"]
    happened.clear()
    assert clock.both_seconds(lambda: happened.append("call"))[0] == 0.0025
    assert happened.count("call") == 2


def test_sides_take_turns(module: Callable[[str], ModuleType]) -> None:
    calls: list[str] = []
    measuring, timing = module("measuring"), module("gpu_timing")
    runners = {name: measuring.Runner(partial(calls.append, name), 1, 0.5) for name in "abc"}
    taken = timing.take_turns(runners, timing.Clock("cpu"), 8)
    turns = [tuple(calls[start : start + 3]) for start in range(0, 24, 3)]
    assert all(sorted(turn) == list("abc") for turn in turns)
    assert len(set(turns)) > 2
    assert {(len(x.device), len(x.wall)) for x in taken.values()} == {(8, 8)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch say that there is such a GPU."""

    def pretend(
        name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), is_there: bool = True
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return pretend


@pytest.mark.parametrize(
    ("name", "file"),
    [("NVIDIA H200", "gpu-h200.jsonl"), ("NVIDIA A100-SXM4-80GB", "gpu-a100-sxm4-80gb.jsonl")],
)
def test_records_are_named_by_the_device(
    module: Callable[[str], ModuleType],
    gpu: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    name: str,
    file: str,
) -> None:
    gpu(name)
    module("gpu_device").main([])
    assert capsys.readouterr().out == f"{file}\n"


def test_a_gpu_that_is_missing_or_too_old_is_refused(
    module: Callable[[str], ModuleType], gpu: Callable[..., None]
) -> None:
    why_no_gpu = module("gpu_device").why_no_gpu
    gpu(is_there=False)
    assert "an NVIDIA GPU is needed; torch" in why_no_gpu()
    gpu("Tesla T4", (7, 5))
    assert "capability 8.0 or above is needed for bfloat16; got 7.5, Tesla T4" in why_no_gpu()
    gpu()
    assert why_no_gpu() is None


def test_on_a_gpu_records_are_measurements_with_memory(
    attention: ModuleType, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything but the GPU itself: its clock and its memory are stood in for."""
    gpu()
    clock = attention.Clock("cpu")
    clock.is_cuda = True
    monkeypatch.setattr(attention.Clock, "wait", lambda self: None)
    monkeypatch.setattr(attention.Clock, "device_seconds", lambda self, step: len(step()) * 1e-3)
    monkeypatch.setattr(attention, "Clock", lambda device: clock if device == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 34, 1 << 35))
    monkeypatch.setattr(attention, "peak_mib", lambda make, limit, device: (limit >> 20, make(), device)[0])
    path = tmp_path / "a.jsonl"
    assert attention.main(["--run", "one", "--json", str(path)]) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["pass"], x["side"]) for x in records] == [
        (name, side) for name in ("forward", "both") for side in ("sdpa_flash", "merged")
    ]
    for x in records:
        assert (x["rehearsal"], x["device_name"], x["capability"], x["turns"]) == (
            False,
            "NVIDIA H200",
            "9.0",
            20,
        )
        # what is free bounds what a call may have
        assert x["peak_mib"] == 1 << 14
        num_returned = 1 if x["pass"] == "forward" else 1 + (3 if x["side"] == "sdpa_flash" else 5)
        assert x["seconds"] == pytest.approx(num_returned * 1e-3)
        assert x["tflops"] >= 0
    assert [x["ratio_to_flash"] for x in records] == [1, 1, 1, 1.5]
