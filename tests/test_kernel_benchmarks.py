"""The benchmarks of the CPU kernel run, go on where they ended, and measure what they say."""

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from relpos import relative_attention
from relpos.backends import cpu

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL_STEP = ["--tokens", "48", "--shortest", "5", "--longest", "8", "--vocabulary", "60", "--turns", "1"]
SMALL_STEP += ["--d-model", "16", "--layers", "1", "--heads", "2", "--d-ff", "16", "--threads", "1"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def bounds(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/bounds.py with small rows in place of its own, of dense, which needs no kernel."""
    bounds, setting = module("bounds"), module("attention_forms").Setting
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


def test_bounds_are_held_against_what_was_measured(
    bounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bounds.jsonl"
    bounds.main(["--turns", "1", "--threads", "1", "--json", str(path)])
    records = {(x["row"], x["pass"]): x for x in lines(path)}
    assert {key: x["is_met"] for key, x in records.items()} == {
        ("short", "forward"): True,
        ("short", "both"): False,
        ("labels", "forward"): None,
        ("memory", "forward"): True,
    }
    assert all(x["own"] > 0 and x["reason"] is None for x in records.values())
    # the logits [8, 256, 256] of dense, and not its output beside them
    assert 2 <= records["memory", "forward"]["own"] < 20
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| row | pass | form | against |")
    assert [line.split(" | ")[-1] for line in printed[2:6]] == ["yes |", "no |", "- |", "yes |"]
    assert printed[-1] == "2 of 3 bounds are met"


def test_a_row_that_was_measured_is_read_and_not_measured_again(
    bounds: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bounds.jsonl"
    arguments = ["--turns", "1", "--threads", "1", "--json", str(path)]
    bounds.main([*arguments, "--rows", "short"])
    capsys.readouterr()
    measured: list[str] = []
    measure = bounds.measure

    def watched(row: Any, *others: Any) -> dict[str, Any]:
        measured.append(row.name)
        return measure(row, *others)

    monkeypatch.setattr(bounds, "measure", watched)
    bounds.main([*arguments, "--rows", "short", "labels"])
    assert measured == ["labels"]
    assert [x["row"] for x in lines(path)] == ["short", "short", "labels"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3 + 2
    same = bounds.circumstances("cpu", 1)
    monkeypatch.setattr(bounds, "circumstances", lambda *_: same | {"kernel": "another"})
    bounds.main([*arguments, "--rows", "labels"])
    assert measured == ["labels", "labels"]


def test_the_page_about_attention_takes_in_the_bounds(
    bounds: ModuleType, module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    records, page = tmp_path / "bounds.jsonl", tmp_path / "page.md"
    for _ in range(2):
        bounds.main(["--turns", "1", "--threads", "1", "--rows", "labels", "--json", str(records)])
    plain = tmp_path / "attention.jsonl"
    sizes = ["--lengths", "4", "--pass", "forward", "--backends", "dense", "--no-memory", "--turns", "1"]
    module("attention").main([*sizes, "--threads", "1", "--device", "cpu", "--json", str(plain)])
    module("plot_attention").main([str(plain), "--table", str(page), "--bounds", str(records)])
    text = page.read_text()
    assert "## The CPU kernel and its bounds" in text
    assert text.count("| labels | forward | dense | sdpa |") == 1


def test_a_form_that_cannot_run_leaves_its_bound_open_until_it_can(
    bounds: ModuleType, module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = {"dense"}
    refuses = lambda name, *_: ["too long"] if name in refused else []  # noqa: E731
    monkeypatch.setattr(module("measuring"), "why_not", refuses)
    path = tmp_path / "bounds.jsonl"
    arguments = ["--rows", "short", "--turns", "1", "--threads", "1", "--json", str(path)]
    bounds.main(arguments)
    found = [(x["is_met"], x["own"], x["reason"]) for x in lines(path)]
    assert found == [(None, None, "dense: too long")] * 2
    # and is measured once it can run
    refused.clear()
    bounds.main(arguments)
    assert [x["is_met"] for x in lines(path)[2:]] == [True, False]


@pytest.mark.parametrize("has_backward", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "dense"])
def test_outputs_that_memory_leaves_out_are_what_a_call_returns(
    module: Callable[[str], ModuleType], name: str, has_backward: bool
) -> None:
    forms = module("attention_forms")
    setting = forms.Setting(length=6, queries=2, batch=3, is_causal=True, has_backward=has_backward)
    returned = forms.make_step(name, setting)()
    num_bytes = sum(x.nbytes for x in returned)
    assert module("bounds").output_mib(name, setting) == num_bytes / 2**20


def test_every_bound_of_the_kernel_has_a_row_of_its_own(module: Callable[[str], ModuleType]) -> None:
    rows = module("bounds").ROWS
    assert len({row.name for row in rows}) == len(rows)
    assert len({(row.setting, row.form, row.against, row.is_memory) for row in rows}) == len(rows)


def test_crossover_reports_where_the_kernel_is_slower(
    module: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crossover = module("crossover")
    path = tmp_path / "crossover.jsonl"
    arguments = [
        "--grids",
        "dropout",
        "--tokens",
        "32",
        "--pass",
        "forward",
        "--turns",
        "1",
        "--threads",
        "1",
    ]
    setting = module("attention_forms").Setting
    with pytest.MonkeyPatch.context() as patch:
        small = {"dropout": [setting(length=8, batch=2, padding=0.5, dropout=0.1)]}
        patch.setattr(crossover, "grids", lambda: small)
        for _ in range(2):
            crossover.main([*arguments, "--slower", "0", "--json", str(path)])
    (record,) = lines(path)
    assert set(record["seconds"]) == {"cpu", "merged", "dense"}
    assert "merged" in record["reasons"]
    assert record["ratio_to"]["merged"] is None
    has_kernel = cpu.UNAVAILABLE is None
    assert (record["ratio_to"]["dense"] is not None) == has_kernel
    printed = capsys.readouterr().out
    assert printed.count(f"in {int(has_kernel)} cells") == 2
    assert "n 8, b 2, padding 0.5, dropout 0.1" in printed


def test_crossover_covers_short_and_long_batched_and_single(module: Callable[[str], ModuleType]) -> None:
    sizes = {(x.length, x.batch > 1) for x in module("crossover").grids()["length"]}
    assert {(1, False), (1, True), (64, False), (64, True), (2048, False), (2048, True)} <= sizes


@pytest.fixture
def step_module(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/translator_step.py that leaves the settings of this process alone."""
    translator_step = module("translator_step")
    monkeypatch.setattr(translator_step, "keep_memory", lambda: None)
    return translator_step


def test_translator_step_measures_each_variant_against_sinusoidal_positions_on_sdpa(
    step_module: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "step.jsonl"
    variants = [name for name in step_module.VARIANTS if "no attention" not in name]
    step_module.main([*SMALL_STEP, "--variants", *variants, "--json", str(path)])
    records = lines(path)
    assert [x["variant"] for x in records] == variants
    assert records[0]["ratio"] == 1
    assert all(x["target_tokens"] == 48 and x["attention_dropout"] == 0.1 for x in records)
    assert [x["variant"] for x in records if x["is_met"] is not None] == ["relative, relpos"]


def test_variants_of_one_model_compute_the_same_and_attend_by_what_they_name(
    step_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = step_module._parser().parse_args([*SMALL_STEP, "--dropout", "0", "--attention-dropout", "0"])
    options.activation_dropout = 0.0
    batch = step_module.make_batch(48, 5, 8, 60)
    calls: list[str] = []
    plain = F.scaled_dot_product_attention

    def watched(*arguments: Any, **keywords: Any) -> torch.Tensor:
        calls.append("sdpa")
        return plain(*arguments, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    losses: dict[str, list[float]] = {}
    num_calls = {}
    for name, variant in step_module.VARIANTS.items():
        if variant.attention is step_module.by_nothing:
            continue
        model = step_module.make_model(variant.positions, options).model
        calls.clear()
        with step_module._attending_by(variant.attention):
            losses.setdefault(variant.positions, []).append(model(**batch).loss.item())
        num_calls[name] = len(calls)
    for values in losses.values():
        assert values == pytest.approx([values[0]] * len(values), rel=1e-5)
    # an encoder's layer attends once, a decoder's twice
    assert (num_calls["sinusoidal, sdpa"], num_calls["relative, cross-attention by sdpa"]) == (3, 1)
    assert num_calls["relative, relpos"] == 0
    assert step_module.relpos.nn._attention.relative_attention is relative_attention


def test_the_profile_of_a_step_names_operators_and_what_relpos_does_around_them(
    step_module: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    step_module.main([*SMALL_STEP, "--variants", "relative, relpos", "--profile"])
    profile = capfd.readouterr().out.partition("\nrelative, relpos\n")[2]
    for label in (
        "arguments of attention, checked",
        "masks of modules, merged",
        "attention, forward",
        "aten::",
    ):
        assert label in profile


def test_a_batch_has_the_tokens_asked_for_in_sentences_of_the_lengths_asked_for(
    step_module: ModuleType,
) -> None:
    batch = step_module.make_batch(200, 5, 8, 60)
    sources, targets = batch["attention_mask"].sum(1), (batch["labels"] != -100).sum(1)
    assert targets.sum() == 200
    assert all(5 <= x <= 8 for x in sources)
    assert all(5 <= x <= 8 for x in targets[:-1])
    assert batch["input_ids"][batch["attention_mask"] == 0].eq(0).all()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "bounds",
            ["--rows", "absent"],
            "argument --rows: must be part of the name of a row; got ['absent'].",
        ),
        ("bounds", ["--turns", "0"], "argument --turns: must be an integer of at least 1; got '0'"),
        ("crossover", ["--slower", "x"], "argument --slower: must be a number of at least 0; got 'x'"),
        ("translator_step", ["--dropout", "1"], "must be a number from 0 on and below 1; got '1'"),
    ],
)
def test_wrong_use_of_a_benchmark_is_refused_in_one_line(
    module: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        module(name).main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_file_of_records_that_holds_something_else_is_refused_by_line(
    bounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bounds.jsonl"
    path.write_text('{"row": "old"}\n{"row": \n')
    with pytest.raises(SystemExit) as stopped:
        bounds.main(["--json", str(path)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"line 2 of {path} must be JSON; got '{{\"row\": '. Remove it." in error


def test_steps_stop_when_their_time_is_over_and_never_count_the_first_turn(step_module: ModuleType) -> None:
    calls: list[str] = []
    steps = {name: partial(calls.append, name) for name in "ab"}
    taken = step_module.take_turns(steps, 20, 0.0)
    assert {name: len(x) for name, x in taken.items()} == {"a": 3, "b": 3}
    assert sorted(calls) == ["a"] * 4 + ["b"] * 4
    assert len(step_module.take_turns(steps, 5, 1e9)["a"]) == 5
