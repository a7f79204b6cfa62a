"""Training: resuming, stopping, several processes, a full disk; all on a recipe of seconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from relpos.translation.checkpoints import average_weights, is_sealed, sealed_checkpoints, verify
from relpos.translation.errors import InputError
from relpos.translation.generation import Translator
from relpos.translation.recipe import Recipe, check_recipe
from relpos.translation.run_cleanup import SAVING
from relpos.translation.training import train

Metrics = Callable[[Path, str], dict[int, float]]


def _wait_for_update(run: Path, metrics: Metrics, update: int, process: subprocess.Popen) -> None:
    """Return once `run` has logged `update`."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        if (run / "metrics.jsonl").is_file() and update in metrics(run, "loss"):
            return
        time.sleep(0.05)
    raise AssertionError(f"update {update} did not come")


def test_same_seed_gives_the_very_same_losses(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    for name in ("first", "second"):
        train(small_recipe(updates=4), tmp_path / name)
    assert metrics(tmp_path / "first", "loss") == metrics(tmp_path / "second", "loss")
    train(small_recipe(updates=4, seed=2), tmp_path / "other")
    assert metrics(tmp_path / "first", "loss") != metrics(tmp_path / "other", "loss")


def test_resumed_run_has_the_very_losses_of_an_unbroken_one(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(small_recipe(updates=40, evaluate_every=17), whole)
    train(small_recipe(updates=17, evaluate_every=17), broken)
    train(small_recipe(updates=40, evaluate_every=17), broken, resume=True)
    losses = metrics(whole, "loss")
    assert len(losses) == 40
    assert metrics(broken, "loss") == losses
    assert metrics(broken, "eval_loss") == metrics(whole, "eval_loss")
    seconds = list(metrics(broken, "seconds").values())
    assert seconds == sorted(seconds)


def test_validating_more_often_changes_no_loss(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    train(small_recipe(updates=8, evaluate_every=2), tmp_path / "often")
    train(small_recipe(updates=8, evaluate_every=8), tmp_path / "seldom")
    assert metrics(tmp_path / "often", "loss") == metrics(tmp_path / "seldom", "loss")


def test_killed_run_goes_on_with_the_very_same_losses(
    small_file: Callable[..., Path],
    small_recipe: Callable[..., Recipe],
    tmp_path: Path,
    metrics: Metrics,
    command: Callable[..., subprocess.Popen],
) -> None:
    run, recipe = tmp_path / "run", small_file(updates=100_000)
    process = command("train", recipe, "--out", run)
    _wait_for_update(run, metrics, 10, process)
    process.kill()
    process.communicate()
    half = run / "checkpoints" / "checkpoint-999"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (half / SAVING).touch()
    train(small_recipe(updates=16), run, resume=True)
    assert not half.exists()
    train(small_recipe(updates=16), tmp_path / "unbroken")
    assert metrics(run, "loss") == metrics(tmp_path / "unbroken", "loss")


def test_interrupt_saves_the_state_and_exits_with_130(
    small_file: Callable[..., Path],
    small_recipe: Callable[..., Recipe],
    tmp_path: Path,
    metrics: Metrics,
    command: Callable[..., subprocess.Popen],
) -> None:
    run = tmp_path / "run"
    process = command("train", small_file(updates=100_000), "--out", run)
    _wait_for_update(run, metrics, 6, process)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in errors
    assert "continue with --resume" in errors.splitlines()[-1]
    stopped_at = int(sealed_checkpoints(run / "checkpoints")[-1].name.rpartition("-")[2])
    assert stopped_at >= 6
    train(small_recipe(updates=stopped_at + 2), run, resume=True)
    train(small_recipe(updates=stopped_at + 2), tmp_path / "unbroken")
    assert metrics(run, "loss") == metrics(tmp_path / "unbroken", "loss")


def test_full_disk_leaves_the_last_good_checkpoint(
    small_file: Callable[..., Path], tmp_path: Path, command: Callable[..., subprocess.Popen]
) -> None:
    run = tmp_path / "run"
    recipe = small_file(updates=4)
    process = command("train", recipe, "--out", run)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    # a limit on the size of files fails like a full disk: in the middle of a write
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    process = command("train", small_file(updates=12), "--out", run, "--resume", before=limit)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert "saving failed" in last
    assert f"the last good checkpoint is {run / 'checkpoints' / 'checkpoint-4'}" in last
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-4"]
    verify(run / "checkpoints" / "checkpoint-4")
    verify(run / "model")
    assert Translator.load(run).translate(["one"])


def test_two_processes_make_the_updates_of_one_with_twice_the_batches(
    small_file: Callable[..., Path], tmp_path: Path, metrics: Metrics
) -> None:
    options = ["--model.dropout", "0", "--model.attention_dropout", "0", "--model.activation_dropout", "0"]
    recipe = small_file(updates=5)
    one = [sys.executable, "-m", "relpos", "train", recipe, "--out", tmp_path / "one", *options]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29621"]
    two = [*launch, "-m", "relpos", "train", recipe, "--out", tmp_path / "two", *options]
    for arguments in ([*one, "--training.accumulation", "2"], two):
        done = subprocess.run(
            [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    alone, together = metrics(tmp_path / "one", "loss"), metrics(tmp_path / "two", "loss")
    assert len(together) == 5
    assert together == pytest.approx(alone, rel=1e-4)
    for name in ("eval_loss", "eval_chrf"):
        assert metrics(tmp_path / "two", name) == pytest.approx(metrics(tmp_path / "one", name), rel=1e-3)


def test_run_folder_holds_what_the_docs_promise(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = train(small_recipe(), run)
    assert model == run / "model"
    names = {
        "recipe.yaml",
        "data.json",
        "tokenizer",
        "checkpoints",
        "metrics.jsonl",
        "logs",
        "model",
        "cache",
        "relpos.json",
        "relpos.lock",
    }
    assert {path.name for path in run.iterdir()} == names
    assert any((run / "logs").iterdir())
    assert is_sealed(model)
    files = {path.name for path in model.rglob("*")}
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]


def test_best_checkpoint_becomes_the_model(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    run = tmp_path / "run"
    # a learning rate that rises until it destroys what was learned
    train(small_recipe(updates=24, warmup=100, learning_rate_scale=200.0, best="loss", keep=1), run)
    losses = metrics(run, "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    assert 4 < best < 20
    checkpoint = run / "checkpoints" / f"checkpoint-{best}" / "model.safetensors"
    assert (run / "model" / "model.safetensors").read_bytes() == checkpoint.read_bytes()


def test_patience_stops_early(small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics) -> None:
    recipe = small_recipe(updates=400, warmup=4, learning_rate_scale=200.0, best="loss", patience=2)
    train(recipe, tmp_path / "run")
    assert max(metrics(tmp_path / "run", "loss")) < 400


def test_time_limit_stops_with_a_validation(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    train(small_recipe(updates=100_000, minutes=0.02), tmp_path / "run")
    losses = metrics(tmp_path / "run", "loss")
    assert max(losses) < 100_000
    assert max(losses) in metrics(tmp_path / "run", "eval_loss")


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_average_of_checkpoints_is_kept_only_if_it_is_no_worse(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics, scale: float
) -> None:
    run = tmp_path / "run"
    train(small_recipe(updates=12, average=3, best="loss", warmup=4, learning_rate_scale=scale), run)
    last_three = sealed_checkpoints(run / "checkpoints")[-3:]
    # the last validation is that of the average, logged at the last update
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    *single, of_average = [line["eval_loss"] for line in lines if "eval_loss" in line]
    saved = load_file(run / "model" / "model.safetensors")
    if of_average <= min(single):
        expected = average_weights(last_three)
    else:
        best = (single.index(min(single)) + 1) * 4
        expected = load_file(run / "checkpoints" / f"checkpoint-{best}" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_resuming_a_finished_run_changes_nothing(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    run, recipe = tmp_path / "run", small_recipe(updates=6, average=2)
    train(recipe, run)
    weights, losses = (run / "model" / "model.safetensors").read_bytes(), metrics(run, "loss")
    # as after a kill before the model was saved
    shutil.rmtree(run / "model")
    lines: list[str] = []
    train(recipe, run, resume=True, report=lines.append)
    assert any("finished before" in line for line in lines)
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert metrics(run, "loss") == losses


def test_patience_counts_on_after_resuming(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    settings = {"warmup": 4, "learning_rate_scale": 200.0, "best": "loss", "patience": 4}
    train(small_recipe(updates=400, **settings), tmp_path / "unbroken")
    last = max(metrics(tmp_path / "unbroken", "eval_loss"))
    assert 8 < last < 400
    train(small_recipe(updates=last - 4, **settings), tmp_path / "broken")
    train(small_recipe(updates=400, **settings), tmp_path / "broken", resume=True)
    assert max(metrics(tmp_path / "broken", "eval_loss")) == last


def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    run = tmp_path / "run"
    train(small_recipe(updates=8), run)
    with (run / "checkpoints" / "checkpoint-8" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    lines: list[str] = []
    train(small_recipe(updates=12), run, resume=True, report=lines.append)
    assert any("passed over" in line and "cut short" in line for line in lines)
    assert any("resuming from checkpoint-4" in line for line in lines)
    train(small_recipe(updates=12), tmp_path / "unbroken")
    assert metrics(run, "loss") == metrics(tmp_path / "unbroken", "loss")


def test_recipe_survives_a_full_disk_while_resuming(
    small_file: Callable[..., Path], tmp_path: Path, command: Callable[..., subprocess.Popen]
) -> None:
    run = tmp_path / "run"
    process = command("train", small_file(updates=4), "--out", run)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    process = command("train", small_file(updates=6), "--out", run, "--resume", before=limit)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    process = command("train", small_file(updates=6), "--out", run, "--resume")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def test_unfinished_checkpoint_is_no_model(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train(small_recipe(updates=4), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    assert Translator.load(checkpoint).translate(["one"])
    (checkpoint / "seal.json").unlink()
    with pytest.raises(InputError, match="was not saved completely"):
        Translator.load(checkpoint)


def test_resuming_with_other_batches_is_refused(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train(small_recipe(updates=4), tmp_path / "run")
    with pytest.raises(InputError, match=r"training\.tokens_per_batch was 512, and is 600 now"):
        train(small_recipe(updates=8, tokens_per_batch=600), tmp_path / "run", resume=True)


def test_run_that_failed_before_its_first_checkpoint_gives_way(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe, run = small_recipe(updates=4), tmp_path / "run"
    wrong = recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"vocabulary": 9000})})
    with pytest.raises(InputError, match="too small for its vocabulary"):
        train(wrong, run)
    assert train(recipe, run) == run / "model"


def test_saved_model_has_a_limit_on_what_generate_makes(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = train(small_recipe(updates=4, max_length=30), tmp_path / "run")
    settings = GenerationConfig.from_pretrained(model)
    assert settings.max_new_tokens == 60
    assert (settings.num_beams, settings.length_penalty) == (4, 0.6)


def test_a_recipe_with_one_beam_gives_a_greedy_model(small_values: dict[str, Any], tmp_path: Path) -> None:
    small_values["training"]["updates"] = 4
    small_values["translation"] = {"beams": 1}
    settings = GenerationConfig.from_pretrained(train(check_recipe(small_values, "small"), tmp_path / "run"))
    assert (settings.num_beams, settings.length_penalty) == (1, None)


def test_warm_up_longer_than_training_is_pointed_out(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    lines: list[str] = []
    train(small_recipe(updates=4, warmup=10), tmp_path / "run", report=lines.append)
    assert any("training.warmup is 10, training.updates 4" in line for line in lines)


def test_resuming_at_the_last_update_makes_no_further_one(
    small_recipe: Callable[..., Recipe], tmp_path: Path, metrics: Metrics
) -> None:
    run = tmp_path / "run"
    train(small_recipe(updates=8), run)
    for changed in ({"updates": 8, "log_every": 2}, {"updates": 4}):
        train(small_recipe(**changed), run, resume=True)
        assert max(metrics(run, "loss")) == 8
        assert not (run / "checkpoints" / "checkpoint-9").exists()


def test_resuming_with_another_schedule_is_refused(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    train(small_recipe(updates=4), tmp_path / "run")
    for name, value in (("warmup", 20), ("learning_rate_scale", 2.0), ("label_smoothing", 0.5)):
        with pytest.raises(InputError, match=rf"training\.{name} was "):
            train(small_recipe(updates=8, **{name: value}), tmp_path / "run", resume=True)


def test_loss_that_is_no_number_stops_training(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be finite; got .* at update \d+.*learning_rate_scale"):
        train(small_recipe(learning_rate_scale=1e30), tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_reader_of_the_progress_that_leaves_is_a_failure(
    small_file: Callable[..., Path], tmp_path: Path
) -> None:
    code = "import sys; from relpos.cli import run; sys.exit(run(sys.argv[1:]))"
    train_it = f"{sys.executable} -c '{code}' train {small_file(updates=300)} --out {tmp_path / 'run'}"
    done = subprocess.run(
        ["bash", "-c", f"{train_it} 2>&1 | head -3; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 1


def test_run_in_use_is_refused(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train(small_recipe(updates=4), tmp_path / "run")
    with pytest.raises(InputError, match=r"holds a run already\. Add --resume"):
        train(small_recipe(updates=4), tmp_path / "run")


def test_nothing_to_resume_is_told(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run to resume"):
        train(small_recipe(), tmp_path / "run", resume=True)


def test_resuming_with_another_model_is_refused(small_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = small_recipe(updates=4)
    train(recipe, tmp_path / "run")
    other = recipe.model_copy(update={"model": recipe.model.model_copy(update={"d_ff": 64})})
    with pytest.raises(InputError, match=r"model\.d_ff was 32, and is 64 now"):
        train(other, tmp_path / "run", resume=True)


def test_corpus_too_small_for_its_vocabulary_is_told(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = small_recipe()
    big = recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"vocabulary": 9000})})
    with pytest.raises(InputError, match=r"too small for its vocabulary: it yields \d+ subwords"):
        train(big, tmp_path / "run")


def test_validation_beyond_learned_positions_is_told_before_training(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = small_recipe(max_length=10)
    model = recipe.model.model_copy(update={"absolute_positions": "learned", "max_positions": 10})
    with pytest.raises(InputError, match=r"validation pair \d+ has \d+ subwords.*max_positions = 10"):
        train(recipe.model_copy(update={"model": model}), tmp_path / "run")
