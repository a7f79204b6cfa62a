"""The report says what the numbers say, escapes what it is given, and stands alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from relpos.inspection import _report as report_module
from relpos.inspection import number_line_picture, write_report
from relpos.inspection._results import main_metric, variant_names
from relpos.inspection._summary import outcome_sentences, training_sentence


def _scores(*, bleu: float = 0.0, exact: float = 0.0, segments: int = 600) -> dict[str, Any]:
    signatures = {"bleu": "nrefs:1|case:mixed|tok:13a", "chrf": "nrefs:1|nc:6"}
    return {"segments": segments, "bleu": bleu, "chrf": bleu, "exact": exact, "signatures": signatures}


def _result(variant: str, *, far: float | None = None, **scores: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"task": "numbers", "title": "Numbers in words", "variant": variant}
    result |= {"weights": 123456, "updates": 800, "seconds": 61.2, "target_tokens_per_second": 9000.0}
    result |= {
        "length_unit": "numbers in the line",
        "trained_up_to": None,
        "scores": _scores(**scores),
        "samples": [{"source": "1 2", "reference": "eins zwei", "hypothesis": f"eins {variant}"}],
        "history": [{"step": 100, "seconds": 9.1, "eval_loss": 3.1, "eval_bleu": 1.2, "eval_exact": 0.0}],
    }
    if far is not None:
        result["trained_up_to"] = 5
        result["buckets"] = [
            {"shortest": 1, "longest": 5, "scores": _scores(exact=1.0, segments=100)},
            {"shortest": 6, "longest": 9, "scores": _scores(exact=far, segments=300)},
        ]
    return result


def _page(path: Path, *args: Any, **kwargs: Any) -> str:
    return write_report(path / "report.html", *args, **kwargs).read_text(encoding="utf-8")


def _told(*results: dict[str, Any]) -> str:
    return " ".join(outcome_sentences(results))


def test_relative_ahead_is_said() -> None:
    told = _told(_result("relative", bleu=31.2), _result("sinusoidal", bleu=29.0), _result("none", bleu=12.5))
    assert "relative is better than every other variant" in told
    assert "sinusoidal 29.0 (2.2 points less)" in told
    assert "worse" not in told


def test_relative_behind_is_said() -> None:
    told = _told(_result("sinusoidal", bleu=31.2), _result("relative", bleu=29.0))
    assert "relative is worse than sinusoidal" in told
    assert "sinusoidal 31.2 (2.2 points more)" in told
    assert "better" not in told


def test_a_tie_is_said() -> None:
    told = _told(_result("relative", bleu=30.2), _result("sinusoidal", bleu=29.9))
    assert "relative is level with sinusoidal" in told
    assert "which may be chance" in told
    assert "better" not in told
    assert "the same" in _told(_result("relative", bleu=30.0), _result("learned", bleu=30.0))


def test_between_two_others_names_both() -> None:
    told = _told(_result("a", bleu=40.0), _result("relative", bleu=30.0), _result("b", bleu=20.0))
    assert "relative is better than b, worse than a:" in told


def test_exact_shares_are_level_within_chance_only() -> None:
    few = [_result(name, exact=share, segments=50) for name, share in (("relative", 0.8), ("none", 0.76))]
    many = [_result(name, exact=share, segments=5000) for name, share in (("relative", 0.8), ("none", 0.76))]
    assert "level with none" in _told(*few)
    assert "better than none" in _told(*many)


def test_lengths_never_trained_on_have_their_own_outcome() -> None:
    told = _told(_result("relative", exact=0.9, far=0.1), _result("learned", exact=0.7, far=0.6))
    overall, beyond = told.split("On lengths never trained on (more than 5 numbers in the line)")
    assert "relative is better than learned" in overall
    assert "relative is worse than learned: relative 10.0 %; learned 60.0 % (50.0 points more)" in beyond


def test_without_relative_the_best_is_told() -> None:
    assert "learned is better than none" in _told(_result("none", bleu=3.0), _result("learned", bleu=9.0))


def test_one_variant_is_compared_with_nothing() -> None:
    told = _told(_result("relative", bleu=20.0))
    assert "relative scores 20.0; there is no other variant to compare it with" in told
    assert "better" not in told


def test_unequal_training_is_said() -> None:
    other = _result("none", bleu=10.0) | {"updates": 500}
    assert "not alike in updates: 500 to 800" in _told(_result("relative", bleu=20.0), other)


def test_training_is_told_from_the_fields() -> None:
    sentence = training_sentence([_result("relative", far=0.5), _result("none", far=0.5)])
    assert sentence == (
        "Two variants (relative and none) were trained on “Numbers in words”, on lines with up to 5 numbers "
        "only. Each has 123,456 weights and was trained for 800 updates in 61 seconds."
    )
    assert training_sentence([{"variant": "relative"}]) == "One variant (relative) was trained on “a task”."


def test_the_outcome_is_told_by_bleu_where_hardly_a_line_is_exact() -> None:
    assert main_metric([_result("relative", bleu=20.0, exact=0.05)]) == "bleu"
    assert main_metric([_result("relative", bleu=20.0, exact=0.5)]) == "exact"
    assert main_metric([{"scores": {"chrf": 3.0}}]) == "chrf"


def test_repeated_runs_of_a_variant_are_numbered() -> None:
    results = [{"variant": "relative"}, {"variant": "none"}, {"variant": "relative"}, {}]
    assert variant_names(results) == ["relative", "none", "relative (2)", "unnamed"]


def test_report_holds_every_part(tmp_path) -> None:
    results = [_result("relative", exact=0.9, bleu=80.0, far=0.5), _result("none", exact=0.3, far=0.0)]
    page = _page(tmp_path, json.loads(json.dumps(results)), title="At work", pictures=[number_line_picture()])
    parts = ("The variants compared", "Short and long input", "While learning", "From positions to rows")
    for words in (*parts, "<title>At work</title>", "eins relative", "eins none", "nrefs:1|case:mixed|tok"):
        assert words in page
    assert page.count("<img ") == 3


def test_report_escapes_all_text(tmp_path) -> None:
    evil = "<script>alert('x')</script>"
    result = _result("relative", bleu=1.0, far=0.1)
    result |= {"title": evil, "length_unit": evil, "variant": evil, "task": evil}
    result["samples"] = [{"source": evil, "reference": evil, "hypothesis": evil}]
    result["scores"]["signatures"] = {"bleu": evil, evil: evil}
    page = _page(tmp_path, [result, result], title=evil)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 8


def test_report_fetches_nothing(tmp_path) -> None:
    page = _page(tmp_path, [_result("relative", far=0.2)], title="t", pictures=[number_line_picture()])
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(addresses) > 3
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "url(" not in page
    assert "@import" not in page


def test_report_is_well_formed(tmp_path) -> None:
    class Nesting(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list) -> None:
            if tag not in ("meta", "link", "img", "br"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    nesting = Nesting()
    nesting.feed(_page(tmp_path, [_result("relative", far=0.2), _result("none")], title="t"))
    nesting.close()
    assert nesting.open_tags == []


@pytest.mark.parametrize(
    "results",
    [
        [],
        [{"task": "t", "variant": "relative"}],
        [{}],
        [{"task": "t", "variant": "a", "scores": {"bleu": float("nan")}, "buckets": None, "samples": [{}]}],
        [{"task": "t", "variant": "a", "buckets": [{"shortest": 1, "longest": 2}], "history": [{"step": 1}]}],
    ],
)
def test_missing_fields_do_not_break_it(tmp_path, results) -> None:
    page = _page(tmp_path, results, title="t")
    assert "</html>" in page
    assert "None" not in page
    assert "nan" not in re.sub(r'"data:[^"]*"', "", page)


def test_an_old_report_survives_a_failure(tmp_path, monkeypatch) -> None:
    path = write_report(tmp_path / "new folder" / "report.html", [], title="old")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(report_module.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(path, [], title="new")
    assert "<title>old</title>" in path.read_text(encoding="utf-8")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
