"""Validation needs no more memory than a training step, and computes no score that nobody reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.preparation import prepare
from relpos.translation.recipe import check_recipe
from relpos.translation.trainer import RelposTrainer
from relpos.translation.training import _make_trainer, make_config


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that `call` held at one time beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path, small_values: dict[str, Any]) -> RelposTrainer:
    """A trainer with a vocabulary of 8,000, or with a decoder whose cache is large, that learned nothing."""
    small_values["training"]["validation_pairs"] = 60
    small_values["data"]["validation"][0]["numbers"]["lines"] = 60
    if request.param == "deep decoder":
        small_values["model"] |= {"d_model": 64, "encoder_layers": 2, "decoder_layers": 6, "d_ff": 128}
    recipe = check_recipe(small_values, "small")
    prepared = prepare(recipe, tmp_path, lambda line: None)
    config = make_config(recipe, prepared.tokenizer)
    if request.param == "wide vocabulary":
        config.vocab_size = 8000
    set_seed(1)
    model = RelposForConditionalGeneration(config)
    with torch.no_grad():
        # no hypothesis ends before its limit, as in a first validation
        model.model.shared.weight[config.eos_token_id] = 0
    trainer = _make_trainer(recipe, prepared, model, tmp_path, [], 1)
    trainer.create_optimizer_and_scheduler(10)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("trainer", ["wide vocabulary", "deep decoder"], indirect=True)
def test_validation_holds_no_more_memory_than_a_training_step(trainer) -> None:
    batches = list(trainer.get_train_dataloader())
    largest = max(batches, key=lambda batch: batch["labels"].numel())

    def step() -> None:
        trainer.model.train()
        trainer.training_step(trainer.model, dict(largest), num_items_in_batch=torch.tensor(1))
        trainer.model.zero_grad()

    step()
    trained = peak_bytes(step)
    validated = peak_bytes(trainer.evaluate)
    # a figure far below says that nothing was measured
    assert 0.1 * trained < validated <= trained
