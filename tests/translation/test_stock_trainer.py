"""transformers' own Seq2SeqTrainer trains the model, and each argument that people use has its effect."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from relpos.translation.config import RelposConfig
from relpos.translation.generation import Search, Translator
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import train_tokenizer

WORDS = ("null", "eins", "zwei", "drei", "vier", "elf", "zwölf")
PAIRS = [
    (" ".join(map(str, row)), " ".join(WORDS[number] for number in row))
    for row in ([(i * i + j) % 7 for j in range(1 + i % 5)] for i in range(32))
]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"relative_max_distance": 4, "label_smoothing": 0.0}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
Fit = Callable[..., Seq2SeqTrainer]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The subwords of all pairs."""
    return train_tokenizer([text for pair in PAIRS for text in pair], 290)


@pytest.fixture(scope="module")
def rows(tokenizer: PreTrainedTokenizerFast) -> datasets.Dataset:
    """Encoded pairs."""
    return datasets.Dataset.from_list(
        [{**tokenizer(source), "labels": tokenizer(target).input_ids} for source, target in PAIRS]
    )


def new_model(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> RelposForConditionalGeneration:
    """The same weights each time; no dropout unless it is set."""
    torch.manual_seed(0)
    given = SIZES | dict.fromkeys(DROPOUTS, 0.0) | {"vocab_size": len(tokenizer)} | settings
    return RelposForConditionalGeneration(RelposConfig(**given))


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast, rows: datasets.Dataset, tmp_path: Path) -> Fit:
    """A trainer of four updates, with changes to its arguments."""

    def call(model: RelposForConditionalGeneration | None = None, **changes: Any) -> Seq2SeqTrainer:
        model = model or new_model(tokenizer)
        own = ("callbacks", "compute_metrics", "data_collator")
        further = {name: changes.pop(name) for name in own if name in changes}
        further.setdefault("data_collator", DataCollatorForSeq2Seq(tokenizer, model=model))
        given = {"output_dir": str(tmp_path / "out"), "max_steps": 4, "logging_steps": 1, "report_to": []}
        given |= {"learning_rate": 0.01, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        arguments = Seq2SeqTrainingArguments(**given | changes)
        return Seq2SeqTrainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            processing_class=tokenizer,
            **further,
        )

    return call


@pytest.fixture
def fit(make: Fit) -> Fit:
    """A trainer that has trained."""

    def call(*model: RelposForConditionalGeneration, **changes: Any) -> Seq2SeqTrainer:
        trainer = make(*model, **changes)
        trainer.train()
        return trainer

    return call


def logged(trainer: Seq2SeqTrainer, name: str = "loss") -> list[float]:
    """Every logged value of `name`."""
    return [line[name] for line in trainer.state.log_history if name in line]


def assert_same_losses(found: Seq2SeqTrainer, true: Seq2SeqTrainer) -> None:
    """Each loss is the same, those after updates too."""
    np.testing.assert_allclose(logged(found), logged(true), rtol=1e-5)


def test_losses_of_the_trainer_are_those_of_a_loop_written_out(fit, tokenizer, rows) -> None:
    trainer = fit(max_grad_norm=0.0, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    model = new_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    collate = DataCollatorForSeq2Seq(tokenizer)
    losses = []
    for start in range(0, 32, 8):
        loss = model(**collate([rows[i] for i in range(start, start + 8)])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose(logged(trainer), losses, rtol=1e-4)
    assert losses[-1] < losses[0] - 0.5


def test_evaluation_reports_the_models_own_loss(make, tokenizer, rows) -> None:
    trainer = make(new_model(tokenizer, **dict.fromkeys(DROPOUTS, 0.5)), per_device_eval_batch_size=8)
    batch = DataCollatorForSeq2Seq(tokenizer)([rows[i] for i in range(8)])
    true = new_model(tokenizer).eval()(**batch).loss.item()
    assert math.isclose(trainer.evaluate()["eval_loss"], true, rel_tol=1e-6)


def test_metrics_without_generation_get_the_logits(make, tokenizer) -> None:
    seen = []
    trainer = make(compute_metrics=lambda given: seen.append(given) or {"seen": 1.0})
    assert trainer.evaluate()["eval_seen"] == 1.0
    (logits, *_), labels = seen[0].predictions, seen[0].label_ids
    assert logits.shape == (*labels.shape, len(tokenizer))


@pytest.mark.parametrize("beams", [1, 3])
def test_predict_with_generate_hands_translations_to_the_metrics(make, tokenizer, rows, beams) -> None:
    seen = []
    given = {"predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": beams}
    trainer = make(**given, compute_metrics=lambda found: seen.append(found.predictions) or {"seen": 1.0})
    metrics = trainer.evaluate()
    batch = DataCollatorForSeq2Seq(tokenizer)([rows[i] for i in range(8)])
    loss = new_model(tokenizer).eval()(**batch).loss.item()
    assert math.isclose(metrics["eval_loss"], loss, rel_tol=1e-6)
    del batch["labels"]
    true = {n: new_model(tokenizer).eval().generate(**batch, num_beams=n, max_length=9) for n in (1, 3)}
    assert not torch.equal(true[1], true[3])
    width = true[beams].shape[1]
    np.testing.assert_array_equal(seen[0][:, :width], true[beams].numpy())
    assert (seen[0][:, width:] == tokenizer.pad_token_id).all()


def test_sources_without_targets_are_translated(make, tokenizer, rows) -> None:
    # a collator for pairs would add labels that are None, and the trainer would ask for a loss
    given = {"predict_with_generate": True, "generation_max_length": 9}
    trainer = make(**given, data_collator=DataCollatorWithPadding(tokenizer))
    found = trainer.predict(rows.remove_columns("labels").select(range(3)))
    assert found.label_ids is None
    assert found.predictions.shape[0] == 3
    assert (found.predictions[:, 0] == tokenizer.bos_token_id).all()


def test_label_smoothing_of_the_trainer_is_that_of_the_configuration(fit, tokenizer) -> None:
    plain, trainers = fit(), fit(label_smoothing_factor=0.3, eval_strategy="epoch")
    own = new_model(tokenizer, label_smoothing=0.3)
    models = fit(own, eval_strategy="epoch")
    assert_same_losses(trainers, models)
    assert logged(models)[0] > logged(plain)[0] + 0.01
    # set twice it acts once
    assert_same_losses(fit(new_model(tokenizer, label_smoothing=0.3), label_smoothing_factor=0.3), models)
    # the trainer smoothes its validation too, the model does not
    smoothed, unsmoothed = (logged(trainer, "eval_loss")[0] for trainer in (trainers, models))
    assert smoothed > unsmoothed + 0.01


def test_group_by_length_makes_batches_with_less_padding(fit, tokenizer) -> None:
    padding: dict[str, int] = {}
    collate = DataCollatorForSeq2Seq(tokenizer, model=new_model(tokenizer))
    batches = {"per_device_train_batch_size": 2, "max_steps": 16}
    for strategy in ("random", "group_by_length"):

        def counted(given: list[dict], strategy: str = strategy) -> Any:
            batch = collate(given)
            padding[strategy] = padding.get(strategy, 0) + int((batch["attention_mask"] == 0).sum())
            return batch

        fit(train_sampling_strategy=strategy, data_collator=counted, **batches)
    assert padding["group_by_length"] < padding["random"] / 2


def test_accumulated_batches_train_as_one_large_batch(fit) -> None:
    small = fit(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_same_losses(small, fit(per_device_train_batch_size=8))


def test_neftune_changes_training_and_not_evaluation(fit) -> None:
    plain, noisy = (fit(neftune_noise_alpha=alpha, eval_on_start=True, max_steps=1) for alpha in (None, 5.0))
    assert abs(logged(noisy)[0] - logged(plain)[0]) > 1e-3
    assert logged(noisy, "eval_loss") == logged(plain, "eval_loss")
    embedding = noisy.model.get_input_embeddings()
    ids = torch.tensor([[5, 6]])
    assert torch.equal(embedding.train()(ids), embedding.eval()(ids))


def test_compiled_training_is_the_same_and_makes_no_graph_for_each_length(fit) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = fit(torch_compile=True, torch_compile_backend="eager")
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    # one for the first length, one for any other
    assert graphs == 2
    assert not counters["graph_break"]
    assert_same_losses(compiled, fit())


CHECKPOINTING = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    "settings",
    [
        CHECKPOINTING,
        CHECKPOINTING | {"activation_checkpointing_kwargs": {"use_reentrant": False}},
        CHECKPOINTING | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        # the older names
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_checkpointed_layers_are_computed_twice_and_train_the_same(fit, tokenizer, settings) -> None:
    runs, calls = [], []
    for changes in ({}, settings):
        # with dropout, which the second computation must repeat
        model, count = new_model(tokenizer, **dict.fromkeys(DROPOUTS, 0.2)), []
        for stack in (model.model.encoder, model.model.decoder):
            stack.layers[0].fc1.register_forward_hook(lambda *_, count=count: count.append(1))
        runs.append(fit(model, max_steps=2, **changes))
        calls.append(len(count))
    assert calls == [4, 8]
    assert_same_losses(runs[1], runs[0])


def test_training_in_bfloat16_loses_little(fit) -> None:
    found, true = logged(fit(bf16=True)), logged(fit())
    assert found != true
    np.testing.assert_allclose(found, true, rtol=0.02)


def test_early_stopping_ends_and_brings_back_the_best_model(fit, tmp_path) -> None:
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = fit(
        **steps,
        # far too high, so that the loss rises
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_steps=12,
        save_total_limit=1,
        load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    losses = logged(trainer, "eval_loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 12
    saved = load_file(tmp_path / "out" / f"checkpoint-{best + 1}" / "model.safetensors")
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value, saved[name]), name
    assert trainer.evaluate()["eval_loss"] == losses[best]


def test_a_resumed_training_has_the_same_losses_to_the_bit(fit, make, tokenizer) -> None:
    dropouts = dict.fromkeys(DROPOUTS, 0.3)
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    whole = fit(new_model(tokenizer, **dropouts), **given)
    other = make(new_model(tokenizer, **dropouts), **given)
    # what the checkpoint does not restore would show
    torch.nn.init.ones_(other.model.model.shared.weight)
    other.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert logged(other) == logged(whole)
    for (name, value), found in zip(whole.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(found, value), name


def test_a_saved_model_translates_as_the_trained_one(fit, tokenizer, tmp_path) -> None:
    trainer = fit(max_steps=60, learning_rate=0.02, save_strategy="steps", save_steps=60)
    trainer.save_model(str(tmp_path / "tuned"))
    texts = [source for source, _ in PAIRS[:5]]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    ids = trainer.model.eval().generate(**given, num_beams=1, max_new_tokens=20)
    true = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert len({*true}) > 1
    # a checkpoint too, which has the name of a run's and no seal
    for folder in (tmp_path / "tuned", tmp_path / "out" / "checkpoint-60"):
        found = Translator.load(folder).translate(texts, Search(beams=1))
        assert [best[0].text for best in found] == true
