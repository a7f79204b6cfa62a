"""The learning rate is the paper's, at every update, as the optimiser has it and as it is logged."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relpos.translation import training
from relpos.translation.schedule import peak_rate, share_of_peak

Metrics = Callable[[Path, str], dict[int, float]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The optimiser's settings at each update that is made from now on."""
    noted: list[dict[str, Any]] = []
    step = torch.optim.AdamW.step

    def note(optimizer: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        assert all(group["lr"] == optimizer.param_groups[0]["lr"] for group in optimizer.param_groups)
        noted.append({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
        return step(optimizer, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    return noted


def paper(step: int, d_model: int, warmup: int, scale: float) -> float:
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


@pytest.mark.parametrize("warmup", [1, 2, 400, 4000])
def test_the_rate_of_each_update_is_the_papers(warmup) -> None:
    for step in {1, 2, warmup - 1, warmup, warmup + 1, 10 * warmup, 100_000} - {0}:
        rate = peak_rate(512, warmup, 1.5) * share_of_peak(step - 1, warmup, first_step=1)
        assert rate == pytest.approx(paper(step, 512, warmup, 1.5), rel=1e-14)


def test_the_optimiser_has_the_papers_rates_and_they_are_logged(
    small_recipe, tmp_path, metrics, groups
) -> None:
    training.train(small_recipe(updates=9, warmup=4, learning_rate_scale=1.5), tmp_path / "run")
    expected = [paper(step, 16, 4, 1.5) for step in range(1, 10)]
    assert [group["lr"] for group in groups] == pytest.approx(expected, rel=1e-12)
    assert max(expected) == expected[3]
    logged = metrics(tmp_path / "run", "learning_rate")
    assert logged == {step: group["lr"] for step, group in enumerate(groups, start=1)}


def test_the_rates_go_on_after_resuming(small_recipe, tmp_path, groups) -> None:
    run = tmp_path / "run"
    training.train(small_recipe(updates=4, warmup=6), run)
    training.train(small_recipe(updates=8, warmup=6), run, resume=True)
    expected = [paper(step, 16, 6, 1.0) for step in range(1, 9)]
    assert [group["lr"] for group in groups] == pytest.approx(expected, rel=1e-12)


def test_a_run_begun_before_keeps_its_schedule_and_says_so(
    small_recipe, tmp_path, monkeypatch, groups
) -> None:
    for name in ("begin_run", "resume_run"):
        opened = getattr(training, name)
        monkeypatch.setattr(
            training, name, lambda *given, opened=opened: dataclasses.replace(opened(*given), format=1)
        )
    run, lines = tmp_path / "run", []
    training.train(small_recipe(updates=4, warmup=6), run)
    training.train(small_recipe(updates=8, warmup=6), run, resume=True, report=lines.append)
    expected = [0.0, *(paper(step, 16, 6, 1.0) for step in range(1, 8))]
    assert [group["lr"] for group in groups] == pytest.approx(expected, rel=1e-12)
    assert [line for line in lines if "keeps its schedule" in line] == [
        "this run was begun by an earlier relpos and keeps its schedule: the first rate is 0"
    ]


def test_the_optimiser_has_the_recipes_settings(small_recipe, tmp_path, groups) -> None:
    training.train(small_recipe(updates=1, adam_betas=(0.7, 0.8), adam_epsilon=1e-3), tmp_path / "run")
    (group,) = groups
    assert group["betas"] == (0.7, 0.8)
    assert group["eps"] == 1e-3
    assert group["weight_decay"] == 0
