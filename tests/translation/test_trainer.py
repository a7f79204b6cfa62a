"""Numbers of training that no run shows at a glance: arguments, losses, limits, what is kept."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from relpos.translation import trainer as trainer_module
from relpos.translation.batching import TokenBatches
from relpos.translation.checkpoints import average_weights, sealed_checkpoints
from relpos.translation.generation import Search
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.preparation import Prepared, prepare
from relpos.translation.recipe import Recipe
from relpos.translation.trainer import RelposTrainer, _Stop
from relpos.translation.training import _make_trainer, make_config, train

Metrics = Callable[[Path, str], dict[int, float]]
Make = Callable[..., RelposTrainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where text is kept for every trainer."""
    return tmp_path_factory.mktemp("text")


@pytest.fixture
def make(small_recipe: Callable[..., Recipe], folder: Path, tmp_path: Path) -> Make:
    """A trainer as a run has it, with changes to the recipe's section `training`."""

    def call(**training: Any) -> RelposTrainer:
        recipe = small_recipe(**training)
        prepared: Prepared = prepare(recipe, folder, lambda line: None)
        torch.manual_seed(0)
        model = RelposForConditionalGeneration(make_config(recipe, prepared.tokenizer))
        return _make_trainer(recipe, prepared, model, tmp_path, [], 1)

    return call


def test_settings_of_the_recipe_reach_the_trainer(make) -> None:
    given = {"seed": 77, "updates": 31, "accumulation": 3, "max_gradient_norm": 0.7, "log_every": 5}
    made = make(**given, evaluate_every=6, label_smoothing=0.3, tokens_per_batch=333)
    arguments = made.args
    assert (arguments.seed, arguments.data_seed or arguments.seed) == (77, 77)
    assert arguments.max_steps == 31
    assert arguments.gradient_accumulation_steps == 3
    assert arguments.max_grad_norm == 0.7
    # the loss of accumulated batches is divided by the labels of all
    assert made.model_accepts_loss_kwargs
    assert arguments.logging_steps == 5
    assert (arguments.eval_steps, arguments.save_steps) == (6, 6)
    assert made.model.config.label_smoothing == 0.3
    batches = made.get_train_dataloader().batch_sampler
    lengths = made.train_dataset["length"][:]
    assert list(batches) == list(TokenBatches(lengths, 333, seed=77))
    assert not make().args.bf16
    assert make(precision="bfloat16").args.bf16
    assert make().args.max_grad_norm == 0


@pytest.mark.parametrize(("best", "is_higher"), [("loss", False), ("bleu", True), ("chrf", True)])
def test_the_best_loss_is_the_lowest_and_the_best_score_the_highest(make, best, is_higher) -> None:
    made = make(best=best)
    made.state = TrainerState(global_step=4)
    for step, value in ((4, 2.0), (8, 3.0), (12, 1.0)):
        made.state.global_step = step
        made._determine_best_metric({f"eval_{best}": value}, None)
    assert made.state.best_metric == (3.0 if is_higher else 1.0)


@pytest.mark.parametrize(("keep", "average", "kept"), [(1, 1, 1), (2, 1, 2), (1, 3, 3)])
def test_the_latest_checkpoints_are_kept_besides_the_best(make, keep, average, kept) -> None:
    trainer = make(keep=keep, average=average)
    assert trainer._keep == kept
    # what transformers would remove itself
    assert trainer.args.save_total_limit is None


def test_each_seed_has_weights_of_its_own(small_recipe, tmp_path) -> None:
    # a rate at which nothing moves
    settings = {"updates": 1, "evaluate_every": 1, "learning_rate_scale": 1e-30, "validation_pairs": 1}
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        model = train(small_recipe(**settings, seed=seed), tmp_path / str(number))
        weights.append(load_file(model / "model.safetensors")["model.shared.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], atol=0.1)


def test_the_validation_loss_is_the_mean_over_all_target_tokens(make) -> None:
    made = make(tokens_per_batch=40)
    total, count = 0.0, 0
    made.model.eval()
    for row in made.eval_dataset:
        source, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = made.model(source, labels=labels).logits[0].double()
        picked = logits.log_softmax(-1).gather(-1, labels[0][:, None])
        total, count = total - float(picked.sum()), count + len(picked)
    # a validation in the middle of training is without dropout, and dropout goes on behind it
    made.model.train()
    assert made.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert made.model.training


def test_the_first_validation_pairs_are_scored_against_their_own_references(make, monkeypatch) -> None:
    made = make(validation_pairs=3)
    asked: list[list[str]] = []
    answers = dict(zip(made.eval_dataset["source"], made.eval_dataset["target"], strict=True))

    def translate(_: object, texts: list[str], search: Search, *, with_scores: bool) -> list[Any]:
        asked.append(texts)
        # a score is a second pass of the model that nobody reads
        assert (search.tokens_per_batch, with_scores) == (512, False)
        return [[SimpleNamespace(text=answers[text])] for text in texts]

    monkeypatch.setattr(trainer_module.Translator, "translate", translate)
    scores = made.evaluate()
    assert asked == [made.eval_dataset["source"][:3]]
    assert (scores["eval_exact"], scores["eval_chrf"]) == (1, 100)


def test_speed_is_of_training_alone_and_seconds_are_of_all_sessions(make, monkeypatch) -> None:
    made = make(validation_pairs=1)
    now = [100.0]
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    made.create_optimizer_and_scheduler(10)
    made.current_gradient_accumulation_steps = 1
    made.state.log_history = [{"step": 1, "seconds": 40.0}, {"step": 2, "seconds": 50.0}]
    made.start_clock()
    batch = next(iter(made.get_train_dataloader()))
    tokens = int((batch["labels"] != -100).sum())
    assert tokens < batch["labels"].numel()
    for _ in range(2):
        made.training_step(made.model, dict(batch), num_items_in_batch=torch.tensor(tokens))
    mean_loss = made._mean_loss

    def slow(rows: Any) -> float:
        now[0] += 1000
        return mean_loss(rows)

    monkeypatch.setattr(made, "_mean_loss", slow)
    made.evaluate()
    now[0] += 4
    made.log({"loss": 1.0, "learning_rate": 1.0})
    now[0] += 10
    made.log({"loss": 1.0, "learning_rate": 1.0})
    speeds = [line for line in made.state.log_history if "target_tokens_per_second" in line]
    assert [line["target_tokens_per_second"] for line in speeds] == [round(2 * tokens / 4, 1), 0]
    assert [line["seconds"] for line in speeds] == [1054, 1064]


@pytest.mark.parametrize(
    ("seconds", "update", "is_over"), [(89.9, 8, False), (90.0, 8, True), (89.9, 9, True)]
)
def test_a_run_ends_with_a_validation_after_its_minutes_or_its_last_update(
    make, seconds, update, is_over
) -> None:
    made = make()
    trainer: Any = SimpleNamespace(seconds=seconds, settings=SimpleNamespace(minutes=1.5))
    control = TrainerControl()
    _Stop(trainer, []).on_step_end(made.args, TrainerState(max_steps=9, global_step=update), control)
    assert control.should_training_stop is is_over
    assert control.should_evaluate is is_over
    assert control.should_save is is_over


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_training_stops_after_so_many_validations_without_a_better_one(
    small_recipe, tmp_path, metrics, patience
) -> None:
    # a learning rate that rises until it destroys what was learned
    changes = {"warmup": 100, "learning_rate_scale": 200.0, "best": "loss", "validation_pairs": 1}
    run = tmp_path / "run"
    train(small_recipe(updates=400, evaluate_every=2, patience=patience, **changes), run)
    losses = metrics(run, "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    assert best > 2
    assert max(losses) == best + 2 * patience


def test_a_validation_that_is_as_good_as_the_best_is_no_better_one(make) -> None:
    for best, value, is_over in (("loss", 2.0, True), ("loss", 1.9, False), ("bleu", 2.0, True)):
        made = make(best=best, patience=1)
        state = TrainerState(max_steps=9, global_step=4, best_metric=2.0, best_global_step=2)
        state.log_history = [{"step": 2, "eval_loss": 1.0}, {"step": 4, "eval_loss": 1.0}]
        control = TrainerControl()
        _Stop(made, []).on_evaluate(made.args, state, control, {f"eval_{best}": value})
        assert control.should_training_stop is is_over


def test_rows_have_the_length_of_their_longer_side_and_none_is_too_long(small_recipe, folder) -> None:
    prepared = prepare(small_recipe(), folder, lambda line: None)
    sides = [(len(row["input_ids"]), len(row["labels"])) for row in prepared.train]
    assert prepared.train["length"][:] == [max(pair) for pair in sides]
    assert any(a > b for a, b in sides)
    assert any(a < b for a, b in sides)
    longest = sorted(prepared.train["length"][:])[len(sides) // 2]
    shorter = prepare(small_recipe(max_length=longest), folder, lambda line: None).train
    assert max(shorter["length"][:]) == longest
    assert len(shorter) == sum(max(pair) <= longest for pair in sides)


def test_a_batch_fills_its_budget_to_the_last_token() -> None:
    assert sorted(len(batch) for batch in TokenBatches([4] * 11, 20)) == [1, 5, 5]
    assert sorted(len(batch) for batch in TokenBatches([4] * 11, 19)) == [3, 4, 4]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_each_process_translates_its_share_and_all_have_every_line_in_order(
    monkeypatch, num_processes
) -> None:
    texts = ["one", "two", "three", "four"]
    shares: list[list[str]] = []
    monkeypatch.setattr(
        trainer_module.Translator,
        "translate",
        lambda _, mine, *rest, **options: [[SimpleNamespace(text=text.upper())] for text in mine],
    )

    class GatheredError(Exception):
        pass

    def note(share: list[list[str]]) -> None:
        shares.extend(share)
        raise GatheredError

    def process(index: int) -> Any:
        arguments = SimpleNamespace(process_index=index, world_size=num_processes)
        settings = SimpleNamespace(tokens_per_batch=8)
        return SimpleNamespace(args=arguments, settings=settings, model=None, processing_class=None)

    monkeypatch.setattr(trainer_module, "gather_object", note)
    for index in range(num_processes):
        with pytest.raises(GatheredError):
            RelposTrainer._translate(process(index), texts)
    assert sorted(chain.from_iterable(shares)) == sorted(text.upper() for text in texts)
    monkeypatch.setattr(trainer_module, "gather_object", lambda share: shares)
    for index in range(num_processes):
        assert RelposTrainer._translate(process(index), texts) == [text.upper() for text in texts]


def test_an_average_that_is_no_better_and_no_worse_becomes_the_model(small_recipe, tmp_path) -> None:
    lines: list[str] = []
    # hardly anything is learned, and every BLEU is 0
    settings = {"updates": 6, "evaluate_every": 2, "average": 2, "learning_rate_scale": 1e-3, "best": "bleu"}
    model = train(small_recipe(**settings), tmp_path / "run", report=lines.append)
    (told,) = [line for line in lines if "of the average of" in line]
    assert told.endswith(" 2 checkpoints 0.000, of the best single one 0.000; kept: the average")
    checkpoints = sealed_checkpoints(tmp_path / "run" / "checkpoints")
    assert len(checkpoints) == 3
    saved, expected = load_file(model / "model.safetensors"), average_weights(checkpoints[1:])
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("updates", "is_told"), [(2, True), (3, False)])
def test_a_rate_that_rises_to_the_end_is_pointed_out(small_recipe, tmp_path, updates, is_told) -> None:
    lines: list[str] = []
    train(small_recipe(updates=updates, warmup=2), tmp_path / "run", report=lines.append)
    assert any("still be rising" in line for line in lines) is is_told
