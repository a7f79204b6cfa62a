"""What the GPU benchmark makes of its records: the suite's report, the aims, the page and the picture."""

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FACTS = (
    "what",
    "run",
    "rehearsal",
    "device_name",
    "torch",
    "commit",
    "capability",
    "driver",
    "cuda",
    "triton",
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase name="test_x[length 17-merged]" time="1"/>
<testcase name="test_x[triton-length 17]"/>
<testcase name="test_x[float32-triton-a]"><failure message="no">long</failure></testcase>
<testcase name="test_y[triton]"><error message="no"/></testcase>
<testcase name="test_y[merged]"><skipped message="merged: has no dropout"/></testcase>
<testcase name="test_triton_is_there"/>
<testcase time="3"/>
</testsuite></testsuites>"""


def test_the_report_of_the_suite_is_counted_by_backend(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    counts, failed = module("gpu_conformance").read_report(tmp_path / "report.xml")
    assert counts == {
        "merged": {"passed": 1, "failed": 0, "skipped": 1},
        "triton": {"passed": 1, "failed": 2, "skipped": 0},
        "others": {"passed": 1, "failed": 0, "skipped": 0},
    }
    assert failed == ["test_x[float32-triton-a]", "test_y[triton]"]


def test_a_report_that_is_not_whole_counts_as_none(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    conformance, path = module("gpu_conformance"), tmp_path / "report.xml"
    nothing = conformance.Ended(-9, {}, [], has_report=False)
    assert conformance._ended(-9, path) == nothing
    path.write_text(REPORT[:200])
    assert conformance._ended(-9, path) == nothing
    path.write_text(REPORT)
    assert conformance._ended(1, path).failed == ["test_x[float32-triton-a]", "test_y[triton]"]


def passed(number: int, failed: int = 0) -> dict[str, int]:
    """Counts of one backend."""
    return {"passed": number, "failed": failed, "skipped": 0}


BOTH = {"merged": passed(3), "triton": passed(3)}


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([(0, BOTH, [])], None),
        # each has what the other lacks; the third has no case
        ([(0, {"merged": passed(3)}, []), (0, {"triton": passed(3)}, []), (5, {}, [])], None),
        (
            [(1, {"merged": passed(3, 1), "triton": passed(3, 1)}, ["a", "b"]), (0, BOTH, [])],
            "2 cases failed",
        ),
        ([(0, BOTH, []), (None, BOTH, [])], "process 2 of 2 was stopped after 9 s"),
        (
            [(None, {}, [], False), (0, BOTH, [])],
            "process 1 of 2 was stopped after 9 s, without a report",
        ),
        ([(0, BOTH, []), (-11, {}, [], False)], "process 2 of 2 ended with status -11, without a report"),
        ([(0, BOTH, []), (0, {}, [], False)], "process 2 of 2 ended with status 0, without a report"),
        # no case of it failed: something else is wrong, and the failure of another does not hide it
        (
            [(1, BOTH, []), (1, {"triton": passed(3, 1)}, ["a"])],
            "1 case failed; process 1 of 2 ended with status 1",
        ),
        ([(0, {"merged": passed(3)}, [])], "no case of triton passed"),
        (
            [(4, {}, [])],
            "process 1 of 1 ended with status 4; no case of merged passed; no case of triton passed",
        ),
    ],
)
def test_a_suite_is_passed_only_where_every_process_ended_well_and_both_backends_ran(
    module: Callable[[str], ModuleType], processes: list[tuple[Any, ...]], reason: str | None
) -> None:
    conformance = module("gpu_conformance")
    ended = [conformance.Ended(*process) for process in processes]
    assert conformance.why_not_passed(ended, ("merged", "triton"), 9.0) == reason


def test_processes_run_each_case_of_the_suite_once_between_them(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance, path = module("gpu_conformance"), tmp_path / "a.jsonl"
    lines = ["import pytest", "@pytest.mark.parametrize('backend', ['merged', 'triton'])"]
    lines += ["@pytest.mark.parametrize('size', range(8))", "def test_it(backend, size): assert size != 7"]
    monkeypatch.setattr(conformance, "SUITE", str(tmp_path / "test_few.py"))
    (tmp_path / "test_few.py").write_text("\n".join(lines))
    given = ["--rehearse", "--json", str(path), "--select", "test_it", "--processes"]
    assert conformance.main([*given, "3"]) == 1
    record = json.loads(path.read_text())
    assert record["counts"] == {name: {"passed": 7, "failed": 1, "skipped": 0} for name in record["counts"]}
    assert set(record["counts"]) == {"merged", "triton"}
    assert sorted(record["failed"]) == ["test_it[7-merged]", "test_it[7-triton]"]
    assert (record["processes"], record["is_finished"], record["is_passed"]) == (3, True, False)
    assert record["reason"] == "2 cases failed"


def test_shares_of_the_cases_are_all_of_them_and_never_the_same(
    module: Callable[[str], ModuleType],
) -> None:
    shares = module("gpu_shares")
    names = [f"tests/a.py::test_b[{number}-é]" for number in range(800)]
    found = [shares.share_of(name, 8) for name in names]
    assert set(found) == set(range(1, 9))
    # none has much more than its eighth
    assert max(map(found.count, range(1, 9))) < 150
    assert {shares.share_of(name, 1) for name in names} == {1}
    assert shares.share("2/8") == (2, 8)


@pytest.mark.parametrize("text", ["", "2", "0/8", "9/8", "-1/8", "1/x", "1/2/3"])
def test_what_is_no_share_is_refused(module: Callable[[str], ModuleType], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number and of how many, like 2/8; got"):
        module("gpu_shares").share(text)


def test_a_suite_that_cannot_run_says_what_it_needs(
    module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conformance, path = module("gpu_conformance"), tmp_path / "a.jsonl"
    monkeypatch.setattr(conformance, "_is_installed", lambda name: name != "pytest")
    assert conformance.main(["--rehearse", "--json", str(path)]) == 1
    reason = "the suite needs pytest, not installed here; it was not run"
    record = json.loads(path.read_text())
    assert (record["is_passed"], record["reason"], record["counts"]) == (False, reason, {})
    assert capsys.readouterr().out.splitlines() == [
        "conformance: NOT PASSED, no case ran",
        f"conformance: {reason}",
    ]


def test_a_suite_that_takes_too_long_is_stopped(
    module: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    arguments = ["--rehearse", "--seconds", "0.2", "--processes", "2", "--json", str(path)]
    assert module("gpu_conformance").main(arguments) == 1
    record = json.loads(path.read_text())
    for number in (1, 2):
        assert f"process {number} of 2 was stopped after 0.2 s" in record["reason"]
    assert record["is_finished"] is False
    assert "conformance: NOT PASSED" in capsys.readouterr().out


def made_up(module: Callable[[str], ModuleType], **changes: Any) -> list[dict[str, Any]]:
    """Records of a run in which all aims are met: the suite, and triton in every cell."""
    facts = {**dict.fromkeys(FACTS), "run": "one", "rehearsal": False, "capability": "9.0"}
    facts |= {"device_name": "NVIDIA H200", "torch": "2.13.0", "commit": "abc1234"} | changes
    suite = {
        **facts,
        "what": "conformance",
        "counts": {"triton": passed(3)},
        "is_finished": True,
        "is_passed": True,
        "reason": None,
    }
    records = [suite]
    for setting in module("gpu_cells").cells(False):
        cell = {**facts, "what": "attention", "pass": "both" if setting.has_backward else "forward"}
        for side, ratio in (("sdpa_flash", 1.0), ("gather", 20.0), ("triton", 1.1)):
            record = {**cell, **asdict(setting), "side": side, "reason": None}
            record |= {"seconds": ratio * 1e-3, "wall_seconds": ratio * 2e-3, "tflops": 100 / ratio}
            record |= {"ratio_to_flash": ratio, "ratio_to_gather": ratio / 20, "peak_mib": 100.0}
            records.append(record)
    return records


def change(records: list[dict[str, Any]], changes: dict[str, Any], **where: Any) -> None:
    """Change the measurements of triton at d 64 and k 16 for which all of `where` holds."""
    where = {"side": "triton", "d_k": 64, "max_distance": 16, **where}
    for x in records:
        if x["what"] == "attention" and all(x[name] == value for name, value in where.items()):
            x.update(changes)


def words(module: Callable[[str], ModuleType], records: list[dict[str, Any]]) -> list[str]:
    """The verdicts: each aim two-sided and causal."""
    return [x.word for x in module("gpu_table").verdicts(records)]


def test_aims_are_met_where_every_cell_holds(module: Callable[[str], ModuleType]) -> None:
    records = made_up(module)
    assert words(module, records) == ["met"] * 8
    # shorter sequences and other tables belong to no aim
    change(records, {"ratio_to_flash": 3.0, "peak_mib": 1.0}, length=1024)
    change(records, {"ratio_to_flash": 3.0}, d_k=128)
    assert words(module, records) == ["met"] * 8


@pytest.mark.parametrize(
    ("changes", "where", "index"),
    [
        ({"ratio_to_flash": 1.11}, {"length": 2048, "pass": "forward", "is_causal": False}, 0),
        ({"ratio_to_flash": 1.11}, {"length": 16_384, "pass": "forward", "is_causal": True}, 1),
        ({"ratio_to_flash": 1.26}, {"length": 8192, "pass": "both", "is_causal": False}, 2),
        ({"ratio_to_gather": 0.13}, {"length": 4096, "pass": "both", "is_causal": True}, 5),
        ({"peak_mib": 126.0}, {"length": 16_384, "pass": "forward", "is_causal": False}, 6),
    ],
)
def test_an_aim_is_missed_where_one_cell_does_not_hold(
    module: Callable[[str], ModuleType], changes: dict[str, Any], where: dict[str, Any], index: int
) -> None:
    records = made_up(module)
    change(records, changes, **where)
    assert [at for at, word in enumerate(words(module, records)) if word != "met"] == [index]
    assert words(module, records)[index] == "missed"


def test_an_aim_is_not_measured_where_a_cell_is_missing(module: Callable[[str], ModuleType]) -> None:
    records = made_up(module)
    nothing = dict.fromkeys(("seconds", "ratio_to_flash", "ratio_to_gather", "peak_mib"))
    change(records, nothing, length=8192, is_causal=False)
    verdicts = module("gpu_table").verdicts(records)
    assert [x.word for x in verdicts] == [
        *("not measured", "met", "not measured", "met"),
        *("met", "met", "not measured", "met"),
    ]
    assert verdicts[0].why == "3 of 4 cells, the highest 1.100"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rehearsal": True}, "a rehearsal measures nothing"),
        (
            {"capability": "8.0", "device_name": "A100"},
            "A100 has capability 8.0, and the aims are for 9.0",
        ),
    ],
)
def test_no_aim_is_met_by_a_rehearsal_or_on_another_gpu(
    module: Callable[[str], ModuleType], changes: dict[str, Any], why: str
) -> None:
    verdicts = module("gpu_table").verdicts(made_up(module, **changes))
    assert {(x.word, x.why) for x in verdicts} == {("not measured", why)}


STOPPED = {"is_passed": False, "is_finished": False, "reason": "process 1 of 2 was stopped after 150 s"}
FAILED = {"triton": passed(3, 2)}


@pytest.mark.parametrize(
    ("changes", "suite", "counts"),
    [
        (STOPPED, "conformance not finished", "triton 3 passed, 0 failed, 0 skipped"),
        (STOPPED | {"counts": FAILED}, "conformance not passed", "triton 3 passed, 2 failed, 0 skipped"),
        (
            {"is_passed": False, "reason": "2 cases failed", "counts": FAILED},
            "conformance not passed",
            "triton 3 passed, 2 failed, 0 skipped",
        ),
        (
            {"is_passed": False, "reason": "no case of merged passed"},
            "conformance not passed",
            "triton 3 passed, 0 failed, 0 skipped",
        ),
        (STOPPED | {"counts": {}}, "conformance not run", "no case ran"),
    ],
)
def test_no_aim_is_met_without_a_suite_that_passed_and_the_figures_are_shown(
    module: Callable[[str], ModuleType], changes: dict[str, Any], suite: str, counts: str
) -> None:
    records = made_up(module)
    records[0] |= changes
    verdicts = module("gpu_table").verdicts(records)
    assert {x.word for x in verdicts} == {f"measured, {suite}"}
    assert verdicts[0].why == f"1.100, not above 1.1; {counts}"
    page = module("gpu_table").page(records)
    assert f"Conformance: NOT PASSED, {records[0]['reason']}; {counts}.\n" in page
    # what is too slow is too slow, whatever it computes
    change(records, {"ratio_to_flash": 1.3}, length=4096, is_causal=False)
    verdicts = module("gpu_table").verdicts(records)
    assert (verdicts[0].word, verdicts[0].why) == ("missed", "1.300, above 1.1")


def test_no_aim_is_met_where_there_was_no_suite(module: Callable[[str], ModuleType]) -> None:
    records = made_up(module)[1:]
    assert words(module, records) == ["measured, conformance not run"] * 8
    assert "Conformance: NOT PASSED, it did not run." in module("gpu_table").page(records)


def test_the_page_says_that_merged_is_not_proven_in_float64_on_a_gpu(
    module: Callable[[str], ModuleType],
) -> None:
    page, said = module("gpu_table").page, "In float64 `merged` has no fused kernel on CUDA"
    assert said in page(made_up(module))
    # a rehearsal has such cases
    assert said not in page(made_up(module, rehearsal=True))


def test_the_page_shows_the_last_run_and_why_cells_are_empty(
    module: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = made_up(module)
    too_long = {"seconds": None, "peak_mib": None, "reason": "too long"}
    change(records, too_long, side="gather", length=16_384)
    records.append({**records[0], "what": "left out", "budget": 240, "cells": ["d 1", "d 2"]})
    path, table = tmp_path / "a.jsonl", tmp_path / "a.md"
    earlier = [{**x, "run": "zero", "device_name": "another"} for x in records[:9]]
    path.write_text("\n".join(map(json.dumps, earlier + records)))
    module("gpu_table").main([str(path), "--table", str(table)])
    text = table.read_text()
    assert capsys.readouterr().out == text
    assert "another" not in text
    assert "REHEARSAL" not in text
    assert "## d 64, k 16, causal, forward and backward" in text
    assert "| 4,096 | 1.000 | - | - | 20.000 (20.00) | - | 1.100 (1.10) |" in text
    assert "| 16,384 | 1.000 | - | - | - | - | 1.100 (1.10) |" in text
    assert "| 4,096 | 2.000 | - | - | 40.000 | - | 2.200 |" in text
    assert "| 4,096 | 100 | - | - | 5 | - | 91 |" in text
    assert "- gather, [n, n, d], d 64, k 16, n 16,384, forward; " in text
    assert "Left out, because the budget of 240 s was spent: d 1; d 2." in text
    assert text.endswith("torch 2.13.0; capability 9.0; commit abc1234; run one.\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "must have a record; got none"), ('{"what": "x"}', "must be a record of gpu_check.sh. Remove it.")],
)
@pytest.mark.parametrize("name", ["gpu_table", "plot_gpu"])
def test_what_is_no_record_is_refused(
    module: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    message: str,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        module(name).main([str(path), *(["--plot", str(tmp_path / "a.png")] if name == "plot_gpu" else [])])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_the_picture_has_a_panel_for_each_pass_and_mask_and_names_what_leaves_it(
    module: Callable[[str], ModuleType], is_rehearsal: bool
) -> None:
    plot = module("plot_gpu")
    records = made_up(module, rehearsal=is_rehearsal)
    change(records, {"ratio_to_flash": None}, length=512)
    figure = plot.draw(plot.chosen(records, None, None))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "forward",
        "forward and backward",
        "forward, causal",
        "forward and backward, causal",
    ]
    for axes, bound in zip(figure.axes, (1.1, 1.25) * 2, strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines) == [
            *("SDPA, flash", "gather, [n, n, d]", "relpos: triton", "aim for relpos: triton")
        ]
        assert list(lines["relpos: triton"].get_xdata()) == [1024, 2048, 4096, 8192, 16_384]
        assert list(lines["aim for relpos: triton"].get_ydata()) == [bound, bound]
        assert axes.texts[0].get_text() == "beyond the picture\ngather, [n, n, d]: 20"
    title = figure.legends[0].get_title().get_text()
    assert ("REHEARSAL" in title) == is_rehearsal
    assert title.endswith("Time over that of flash attention without positions")


def test_the_picture_shows_other_tables_where_asked(module: Callable[[str], ModuleType]) -> None:
    plot, records = module("plot_gpu"), made_up(module)
    some = plot.chosen(records, 128, 128)
    assert {(x["d_k"], x["max_distance"]) for x in some} == {(128, 128)}
    assert "aim for relpos: triton" not in [x.get_label() for x in plot.draw(some).axes[0].get_lines()]
    with pytest.raises(ValueError, match=r"--d-k must be one of \[64, 128\]; got 96"):
        plot.chosen(records, 96, None)
