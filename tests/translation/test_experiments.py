"""Experiments: what is done is not done again, never under other settings, and no kill spoils the results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relpos.translation import experiments
from relpos.translation.checkpoints import seal
from relpos.translation.errors import InputError, UsageError
from relpos.translation.experiments import (
    Experiment,
    fingerprint,
    load_experiment,
    packaged_experiments,
    read_results,
    run_experiment,
)
from relpos.translation.ownership import working_in
from relpos.translation.recipe import Recipe, load_recipe, write_recipe

Trained = list[tuple[Path, bool]]


@pytest.fixture
def experiment(small_file: Callable[..., Path]) -> Experiment:
    """One task in two variants."""
    task = {"name": "numbers", "title": "Numbers", "recipe": str(small_file(updates=2, evaluate_every=1))}
    variants: dict = {"relative": {}, "none": {"model.relative_max_distance": None}}
    return Experiment(title="Small", tasks=[task], variants=variants)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Nothing is trained or scored; the folders that would be, and whether resumed."""
    asked: Trained = []

    def train(recipe: Recipe, run: Path, *, resume: bool, report: Callable[[str], None]) -> Path:
        asked.append((run, resume))
        with working_in(run, "run"):
            (run / "model").mkdir(exist_ok=True)
            seal(run / "model")
        write_recipe(recipe, run / "recipe.yaml")
        return run / "model"

    def measure(*args: Any) -> dict[str, Any]:
        return {"samples": [{"source": "a\u2028b", "hypothesis": "f\u00fcnf"}]}

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr(experiments, "_measure", measure)
    return asked


def _names(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(record["task"], record["variant"]) for record in records]


BOTH = [("numbers", "relative"), ("numbers", "none")]
RECORD = '{"task": "numbers", "variant": "none"}'


def test_packaged_experiments_load_with_recipes_for_every_variant() -> None:
    assert {"demo", "multi30k"} <= set(packaged_experiments())
    for name in packaged_experiments():
        loaded = load_experiment(name)
        prints = [fingerprint(recipe) for _, _, recipe in experiments.plan(loaded, [])]
        assert len(set(prints)) == len(loaded.tasks) * len(loaded.variants)


def test_what_is_done_is_not_done_again(experiment, trained, tmp_path) -> None:
    told: list[str] = []
    first = run_experiment(experiment, tmp_path)
    assert _names(first) == BOTH
    assert trained == [(tmp_path / "numbers" / name, False) for name in ("relative", "none")]
    assert run_experiment(experiment, tmp_path, report=told.append) == first
    assert len(trained) == 2
    assert told == ["run 1 of 2: numbers, relative: done before", "run 2 of 2: numbers, none: done before"]


def test_a_line_cut_short_by_a_kill_is_done_again_and_spoils_no_other(experiment, trained, tmp_path) -> None:
    first = run_experiment(experiment, tmp_path)
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    # in a sign of two bytes; in the middle; before the line feed alone
    for end in (whole.rindex("ü".encode()) + 1, second + 20, len(whole) - 1):
        file.write_bytes(whole[:end])
        trained.clear()
        assert _names(read_results(file)) == BOTH[:1]
        assert run_experiment(experiment, tmp_path) == first
        assert trained == [(tmp_path / "numbers" / "none", True)]
        assert file.read_bytes() == whole


def test_a_damaged_line_is_told_with_its_number(tmp_path) -> None:
    (tmp_path / "results.jsonl").write_text(f"{RECORD}\n{RECORD[:-1]}\n{RECORD}\n")
    with pytest.raises(InputError, match=r"results\.jsonl line 2 is damaged; delete that line"):
        read_results(tmp_path / "results.jsonl")


def test_results_of_other_settings_are_not_taken_for_those_asked_for(experiment, trained, tmp_path) -> None:
    run_experiment(experiment, tmp_path)
    with pytest.raises(UsageError, match=r"results of other settings \(numbers, relative\); choose another"):
        run_experiment(experiment, tmp_path, ["training.updates=3"])
    # what was written before records had a fingerprint
    (tmp_path / "results.jsonl").write_text(f"{RECORD}\n")
    with pytest.raises(UsageError, match=r"\(numbers, none\); choose another --out"):
        run_experiment(experiment, tmp_path)
    assert len(trained) == 2


def test_a_run_of_other_settings_is_not_gone_on_with(experiment, trained, tmp_path) -> None:
    run_experiment(experiment, tmp_path)
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(UsageError, match="choose another --out"):
        run_experiment(experiment, tmp_path, ["training.updates=3"])
    assert len(trained) == 2


def test_a_wrong_option_is_told_before_anything_is_trained(experiment, trained, tmp_path) -> None:
    experiment.variants["wrong"] = {"model.relative_max_distance": -1}
    with pytest.raises(UsageError, match="relative_max_distance"):
        run_experiment(experiment, tmp_path)
    assert trained == []


def test_the_fingerprint_is_that_of_the_settings_wherever_the_data_lie() -> None:
    def of(*overrides: str) -> str:
        return fingerprint(load_recipe("numbers", list(overrides)))

    assert of() == of("data.folder=elsewhere") == of("training.updates=900")
    assert len({of(), of("training.updates=901"), of("data.seed=1"), of("translation.beams=1")}) == 4


def test_results_that_cannot_be_written_are_told_by_name(experiment, trained, tmp_path, monkeypatch) -> None:
    def is_full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(experiments, "write_text_atomic", is_full)
    with pytest.raises(OSError, match=r"results\.jsonl'"):
        run_experiment(experiment, tmp_path)


@pytest.mark.parametrize("name", ["results.jsonl", "report.html", "numbers/none/model", "numbers/none/logs"])
def test_a_folder_of_another_is_refused_before_anything_is_written(
    experiment, trained, tmp_path, name
) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine")
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(InputError, match=f"holds {place.name} that relpos did not write"):
        run_experiment(experiment, tmp_path)
    assert place.read_text() == "mine"
    assert {path for path in tmp_path.rglob("*")} == before
    assert trained == []


def test_another_process_in_the_folder_is_refused(experiment, trained, tmp_path) -> None:
    with working_in(tmp_path, "experiment"), pytest.raises(InputError, match="another process"):
        run_experiment(experiment, tmp_path)
    assert trained == []


def test_a_kill_between_training_and_results_trains_nothing_again(experiment, tmp_path) -> None:
    del experiment.variants["none"]
    run_experiment(experiment, tmp_path)
    run = tmp_path / "numbers" / "relative"
    metrics, checkpoint = (run / "metrics.jsonl").read_bytes(), run / "checkpoints" / "checkpoint-2"
    saved = (checkpoint / "model.safetensors").stat().st_mtime_ns
    first = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").unlink()
    run_experiment(experiment, tmp_path)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == saved
    assert (tmp_path / "results.jsonl").read_bytes() == first
    record = json.loads(first)
    assert record["updates"] == 2
    assert [sample.keys() for sample in record["samples"]] == [{"source", "reference", "hypothesis"}] * 12
