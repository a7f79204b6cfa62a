"""What a person reads while training: the update of all, scores, and the time that is left."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from relpos.translation.trainer import _Progress
from relpos.translation.training import train

LOSS = {"loss": 2.5, "learning_rate": 1e-3, "target_tokens_per_second": 1234.5, "seconds": 40.0}
SCORES = {"eval_loss": 2.5, "eval_bleu": 10.0, "eval_chrf": 20.0, "eval_exact": 0.25, "seconds": 40.0}


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line that is written for `logs`; `seconds` are those of this session, `before` those before it."""

    def write(
        logs: dict[str, float],
        step: int,
        seconds: float,
        *,
        resumed_at: int = 0,
        before: float = 0.0,
        minutes: float | None = None,
    ) -> str:
        trainer: Any = SimpleNamespace(
            seconds=before + seconds,
            session_seconds=seconds,
            settings=SimpleNamespace(minutes=minutes),
            start_clock=lambda: None,
        )
        progress = _Progress(trainer, tmp_path / "metrics.jsonl")
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        state = TrainerState(max_steps=1200, global_step=resumed_at, is_world_process_zero=True)
        progress.on_train_begin(arguments, state, TrainerControl())
        state.global_step = step
        capsys.readouterr()
        progress.on_log(arguments, state, TrainerControl(), logs)
        progress.on_train_end(arguments, state, TrainerControl())
        return capsys.readouterr().err.rstrip("\n")

    return write


def test_a_line_names_the_update_of_all_and_the_time_left(line) -> None:
    assert line(LOSS, 50, 10.0) == (
        "update    50 of 1,200  loss 2.500  learning rate 1.00e-03  1,234 target tokens/s  about 4 min left"
    )
    assert line(SCORES, 600, 7200.0) == (
        "update   600 of 1,200  validation loss 2.500  BLEU 10.00  chrF 20.00  exact 25.0%  about 2.0 h left"
    )
    assert line(LOSS, 1150, 1150.0).endswith("  about 50 s left")


def test_time_left_is_at_the_pace_of_this_session(line) -> None:
    assert line(LOSS, 1000, 100.0, resumed_at=800, before=9000.0).endswith("  about 2 min left")


def test_time_left_ends_at_the_limit_of_minutes(line) -> None:
    assert line(LOSS, 600, 600.0, before=60.0, minutes=12.0).endswith("  about 60 s left")
    assert line(LOSS, 600, 600.0, minutes=60.0).endswith("  about 10 min left")
    assert line(LOSS, 600, 600.0, minutes=9.0).endswith("  about 0 s left")


def test_nothing_is_said_of_time_that_is_not_known_or_over(line) -> None:
    assert line(SCORES, 600, 10.0, resumed_at=600).endswith("exact 25.0%")
    assert line(SCORES, 1200, 10.0).endswith("exact 25.0%")


def test_lines_of_a_run_come_off_a_terminal(small_recipe, tmp_path, capsys) -> None:
    train(small_recipe(updates=4, evaluate_every=2), tmp_path / "run")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("update")]
    assert [told_line[:13] for told_line in told] == [f"update {step} of 4" for step in (1, 2, 2, 3, 4, 4)]
    assert [" left" in told_line for told_line in told] == [True, True, True, True, False, False]
    logged = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == len(told)
