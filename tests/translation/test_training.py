"""Training: resuming, stopping, several processes, a full disk; all on a recipe of seconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from relpos.cli import run as relpos
from relpos.translation.checkpoints import average_weights, is_sealed, sealed_checkpoints, verify
from relpos.translation.errors import InputError
from relpos.translation.generation import Translator
from relpos.translation.recipe import check_recipe, load_recipe
from relpos.translation.run_cleanup import SAVING
from relpos.translation.trainer import RelposTrainer
from relpos.translation.training import train
from small_runs import wait_until


def test_same_seed_gives_the_very_same_losses(small_recipe, tmp_path, metrics) -> None:
    for name in ("first", "second"):
        train(small_recipe(updates=4), tmp_path / name)
    assert metrics(tmp_path / "first", "loss") == metrics(tmp_path / "second", "loss")
    train(small_recipe(updates=4, seed=2), tmp_path / "other")
    assert metrics(tmp_path / "first", "loss") != metrics(tmp_path / "other", "loss")


def test_resumed_run_has_the_very_losses_of_an_unbroken_one(small_recipe, tmp_path, metrics) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # in the middle of an epoch
    train(small_recipe(updates=20, evaluate_every=9), whole)
    train(small_recipe(updates=9, evaluate_every=9), broken)
    train(small_recipe(updates=20, evaluate_every=9), broken, resume=True)
    losses = metrics(whole, "loss")
    assert len(losses) == 20
    assert metrics(broken, "loss") == losses
    assert metrics(broken, "eval_loss") == metrics(whole, "eval_loss")
    seconds = list(metrics(broken, "seconds").values())
    assert seconds == sorted(seconds)


def test_validating_more_often_changes_no_loss(small_recipe, tmp_path, metrics) -> None:
    train(small_recipe(updates=8, evaluate_every=2), tmp_path / "often")
    train(small_recipe(updates=8, evaluate_every=8), tmp_path / "seldom")
    assert metrics(tmp_path / "often", "loss") == metrics(tmp_path / "seldom", "loss")


def test_killed_run_goes_on_with_the_very_same_losses(
    small_file, small_recipe, tmp_path, metrics, command
) -> None:
    run, recipe = tmp_path / "run", small_file(updates=100_000)
    process = command("train", recipe, "--out", run)
    wait_until(lambda: (run / "metrics.jsonl").is_file() and 10 in metrics(run, "loss"), process)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_the_state_names_it_and_ends_the_command(
    small_file, small_recipe, tmp_path, metrics, monkeypatch, capsys, number
) -> None:
    run, step, steps = tmp_path / "run", RelposTrainer.training_step, iter(range(1, 100))

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(steps) == 6:
            os.kill(os.getpid(), number)
        return step(*arguments, **options)

    before = signal.signal(number, lambda *_: pytest.fail("training does not wait for this signal"))
    with monkeypatch.context() as patched:
        patched.setattr(RelposTrainer, "training_step", interrupted)
        assert relpos(["train", str(small_file(updates=100_000)), "--out", str(run)]) == 128 + number
    signal.signal(number, before)
    out, errors = capsys.readouterr()
    assert out == ""
    assert f"{run / 'checkpoints' / 'checkpoint-6'}; continue with --resume" in errors.splitlines()[-1]
    train(small_recipe(updates=8), run, resume=True)
    train(small_recipe(updates=8), tmp_path / "unbroken")
    assert metrics(run, "loss") == metrics(tmp_path / "unbroken", "loss")


def test_full_disk_leaves_the_last_good_checkpoint(small_file, tmp_path, command) -> None:
    run = tmp_path / "run"
    train(load_recipe(str(small_file(updates=4))), run)
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


def test_two_processes_make_the_updates_of_one_with_twice_the_batches(small_file, tmp_path, metrics) -> None:
    options = [f"--model.{name}=0" for name in ("dropout", "attention_dropout", "activation_dropout")]
    arguments = ["train", str(small_file(updates=5)), *options, "--out"]
    assert relpos([*arguments, str(tmp_path / "one"), "--training.accumulation", "2"]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29621"]
    two = [*launch, "-m", "relpos", *arguments, str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(two, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    alone, together = metrics(tmp_path / "one", "loss"), metrics(tmp_path / "two", "loss")
    assert len(together) == 5
    assert together == pytest.approx(alone, rel=1e-4)
    for name in ("eval_loss", "eval_chrf"):
        assert metrics(tmp_path / "two", name) == pytest.approx(metrics(tmp_path / "one", name), rel=1e-3)


def test_run_folder_holds_what_the_docs_promise(small_recipe, tmp_path) -> None:
    run = tmp_path / "run"
    model = train(small_recipe(), run)
    assert model == run / "model"
    names = {"recipe.yaml", "data.json", "metrics.jsonl", "relpos.json", "relpos.lock"}
    names |= {"tokenizer", "checkpoints", "logs", "model", "cache"}
    assert {path.name for path in run.iterdir()} == names
    assert any((run / "logs").iterdir())
    assert is_sealed(model)
    files = {path.name for path in model.rglob("*")}
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_average_of_checkpoints_is_kept_only_if_it_is_no_worse(
    small_recipe, tmp_path, metrics, scale
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


def test_a_kill_before_checkpoints_are_averaged_leaves_no_other_model(
    small_recipe, tmp_path, monkeypatch
) -> None:
    settings = {"updates": 12, "evaluate_every": 3, "keep": 1, "average": 2, "best": "loss"}
    run, recipe = tmp_path / "run", small_recipe(**settings)
    unbroken = train(recipe, tmp_path / "unbroken")

    def killed(folders: list[Path]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("relpos.translation.training.average_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, run)
    assert not (run / "model").exists()
    train(recipe, run, resume=True)
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert weights == (unbroken / "model.safetensors").read_bytes()
    # it would have been the model before
    last = sealed_checkpoints(run / "checkpoints")[-1] / "model.safetensors"
    assert weights != last.read_bytes()


def test_resuming_a_finished_run_changes_nothing(small_recipe, tmp_path, metrics) -> None:
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


def test_patience_counts_on_after_resuming(small_recipe, tmp_path, metrics) -> None:
    settings = {"warmup": 4, "learning_rate_scale": 200.0, "best": "loss", "patience": 4}
    settings |= {"validation_pairs": 1, "evaluate_every": 2}
    train(small_recipe(updates=400, **settings), tmp_path / "unbroken")
    last = max(metrics(tmp_path / "unbroken", "eval_loss"))
    assert 8 < last < 400
    train(small_recipe(updates=last - 4, **settings), tmp_path / "broken")
    train(small_recipe(updates=400, **settings), tmp_path / "broken", resume=True)
    assert max(metrics(tmp_path / "broken", "eval_loss")) == last


def test_damaged_checkpoint_is_passed_over_for_the_one_before(small_recipe, tmp_path, metrics) -> None:
    run = tmp_path / "run"
    train(small_recipe(updates=8), run)
    with (run / "checkpoints" / "checkpoint-8" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    lines: list[str] = []
    train(small_recipe(updates=12), run, resume=True, report=lines.append)
    assert any(line.startswith("skipped: ") and "cut short" in line for line in lines)
    assert any("resuming from checkpoint-4" in line for line in lines)
    train(small_recipe(updates=12), tmp_path / "unbroken")
    assert metrics(run, "loss") == metrics(tmp_path / "unbroken", "loss")


def test_unfinished_checkpoint_is_no_model(small_recipe, tmp_path) -> None:
    train(small_recipe(updates=4), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    assert Translator.load(checkpoint).translate(["one"])
    (checkpoint / "seal.json").unlink()
    with pytest.raises(InputError, match="was not saved completely"):
        Translator.load(checkpoint)


@pytest.mark.parametrize(("search", "expected"), [({}, (4, 0.6)), ({"beams": 1}, (1, None))])
def test_saved_model_searches_as_the_recipe_says(small_values, tmp_path, search, expected) -> None:
    small_values["training"] |= {"updates": 2, "max_length": 30, "evaluate_every": 2}
    recipe = check_recipe({**small_values, "translation": search}, "small")
    settings = GenerationConfig.from_pretrained(train(recipe, tmp_path / "run"))
    assert settings.max_new_tokens == 60
    assert (settings.num_beams, settings.length_penalty) == expected


def test_resuming_at_the_last_update_makes_no_further_one(small_recipe, tmp_path, metrics) -> None:
    run = tmp_path / "run"
    train(small_recipe(updates=8), run)
    for changed in ({"updates": 8, "log_every": 2}, {"updates": 4}):
        train(small_recipe(**changed), run, resume=True)
        assert max(metrics(run, "loss")) == 8
        assert not (run / "checkpoints" / "checkpoint-9").exists()


def test_loss_that_is_no_number_stops_training(small_recipe, tmp_path) -> None:
    with pytest.raises(InputError, match=r"must be finite; got .* at update \d+.*learning_rate_scale"):
        train(small_recipe(learning_rate_scale=1e30), tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_reader_of_the_progress_that_leaves_is_a_failure(small_file, tmp_path) -> None:
    code = "import sys; from relpos.cli import run; sys.exit(run(sys.argv[1:]))"
    train_it = f"{sys.executable} -c '{code}' train {small_file(updates=300)} --out {tmp_path / 'run'}"
    piped = ["bash", "-c", f"{train_it} 2>&1 | head -3; exit ${{PIPESTATUS[0]}}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(piped, capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 1


def test_validation_beyond_learned_positions_is_told_before_training(small_recipe, tmp_path) -> None:
    recipe = small_recipe(max_length=10)
    model = recipe.model.model_copy(update={"absolute_positions": "learned", "max_positions": 10})
    with pytest.raises(InputError, match=r"validation pair \d+ must have .*max_positions = 10 .*; got \d+"):
        train(recipe.model_copy(update={"model": model}), tmp_path / "run")
