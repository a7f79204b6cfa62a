"""Gradient checkpointing of the translation model: layers are computed again, and gradients stay the same."""

from collections.abc import Callable

import pytest
import torch
from test_model import model, new_cache, tokens
from torch import Tensor, nn

from refusals import refuses
from relpos.translation.model import RelposForConditionalGeneration

# the older names, which Trainer and PEFT use
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_.*able` is deprecated:FutureWarning")

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3}
each_way = pytest.mark.parametrize("is_reentrant", [True, False])


def trained(is_reentrant: bool | None, **settings) -> RelposForConditionalGeneration:
    """A model in training mode, with checkpointing unless `is_reentrant` is None."""
    made = model(**settings).train()
    if is_reentrant is not None:
        made.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    return made


def gradients(made: RelposForConditionalGeneration, **arguments) -> dict[str, Tensor]:
    """The loss and all gradients, of a source and a target with padding."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = tokens(2, 4)
    labels[1, 2:] = -100
    torch.manual_seed(5)
    loss = made(tokens(2, 5), mask, labels=labels, **arguments).loss
    loss.backward()
    found = {name: weight.grad for name, weight in made.named_parameters()}
    return found | {"loss": loss.detach()}


@each_way
@pytest.mark.parametrize("dropouts", [NO_DROPOUT, DROPOUT])
@pytest.mark.parametrize("kind", ["relpos", "eager"])
def test_gradients_are_those_without_checkpointing(is_reentrant, dropouts, kind) -> None:
    settings = dropouts | {"relative_per_head": True, "absolute_positions": "learned"}
    true = gradients(trained(None, **settings, attn_implementation=kind))
    found = gradients(trained(is_reentrant, **settings, attn_implementation=kind))
    assert found.keys() == true.keys()
    for name, gradient in found.items():
        assert gradient is not None, name
        torch.testing.assert_close(
            gradient, true[name], atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def counted(made: RelposForConditionalGeneration) -> list[int]:
    """How often each layer's feed-forward network ran; the list grows as the model is called."""
    layers = [*made.model.encoder.layers, *made.model.decoder.layers]
    counts = [0] * len(layers)

    def counting(i: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[i] += 1

        return hook

    for i, layer in enumerate(layers):
        layer.fc1.register_forward_hook(counting(i))
    return counts


@pytest.mark.parametrize(("is_reentrant", "times"), [(None, 1), (True, 2), (False, 2)])
def test_each_layer_is_computed_again_for_its_gradients(is_reentrant, times) -> None:
    made = trained(is_reentrant)
    counts = counted(made)
    gradients(made)
    assert counts == [times] * 4


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_can_be_switched_off_and_does_nothing_without_gradients(name) -> None:
    made = trained(None)
    getattr(made, f"{name}_enable")()
    counts = counted(made)
    with torch.no_grad():
        made(tokens(2, 5), labels=tokens(2, 4))
    made.eval()
    gradients(made)
    assert counts == [2] * 4
    getattr(made.train(), f"{name}_disable")()
    gradients(made)
    assert counts == [3] * 4


def kept_bytes(made: RelposForConditionalGeneration) -> int:
    """Bytes of tensors kept from a forward pass for its backward pass, but for parameters and arguments.

    Counts what autograd saves and the inputs of layers, which checkpointing keeps.
    """
    kept: dict[int, Tensor] = {}
    own = {weight.untyped_storage().data_ptr() for weight in made.parameters()}

    def keep(x: object) -> object:
        if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in own:
            # the tensor is held, so that its memory is not used again
            kept[x.untyped_storage().data_ptr()] = x.detach()
        return x

    def keep_inputs(_: nn.Module, arguments: tuple, named: dict) -> None:
        for x in (*arguments, *named.values()):
            keep(x)

    for layer in (*made.model.encoder.layers, *made.model.decoder.layers):
        layer.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        made(tokens(2, 40), labels=tokens(2, 40))
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@each_way
def test_checkpointing_keeps_less_memory_and_little_for_each_layer(is_reentrant) -> None:
    sizes = {}
    for layers in (2, 6):
        settings = {"encoder_layers": layers, "decoder_layers": layers}
        sizes[layers] = [kept_bytes(trained(way, **settings)) for way in (None, is_reentrant)]
        assert sizes[layers][1] < sizes[layers][0] / 2, sizes
    # of each pair of layers two inputs [2, 40, 16] of float64 are kept
    for_pair = (sizes[6][1] - sizes[2][1]) / 4
    assert 2 * (2 * 40 * 16 * 8) <= for_pair < 3 * (2 * 40 * 16 * 8)
    assert (sizes[6][0] - sizes[2][0]) / 4 > 10 * for_pair


@each_way
def test_hidden_states_and_weights_come_once_and_gradients_go_through_them(is_reentrant) -> None:
    found, true = {}, {}
    for way, gathered in ((is_reentrant, found), (None, true)):
        made = trained(way, **NO_DROPOUT)
        out = made(tokens(2, 5), labels=tokens(2, 4), output_hidden_states=True, output_attentions=True)
        out.loss.backward()
        assert [len(x) for x in (out.encoder_hidden_states, out.encoder_attentions)] == [3, 2]
        assert [
            len(x) for x in (out.decoder_hidden_states, out.decoder_attentions, out.cross_attentions)
        ] == [3, 2, 2]
        gathered |= {name: weight.grad for name, weight in made.named_parameters()}
    torch.testing.assert_close(found, true, atol=1e-9, rtol=1e-9)


@each_way
def test_frozen_embeddings_leave_gradients_to_the_layers(is_reentrant) -> None:
    found, true = {}, {}
    for way, gathered in ((is_reentrant, found), (None, true)):
        made = trained(way, **NO_DROPOUT)
        made.get_input_embeddings().weight.requires_grad_(False)
        if way:
            # reentrant checkpoints need an input with a gradient, as transformers' documentation says
            made.enable_input_require_grads()
        made(tokens(2, 5), labels=tokens(2, 4)).loss.backward()
        gathered |= {name: x.grad for name, x in made.named_parameters() if x.requires_grad}
    assert None not in found.values()
    torch.testing.assert_close(found, true, atol=1e-9, rtol=1e-9)


def test_no_cache_is_made_while_checkpointing_trains(monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("relpos.translation.arguments._logger.warning_once", told.append)
    made = trained(False)
    given = {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
    assert made(**given).cache is None
    assert told == []
    assert made(**given, use_cache=True).cache is None
    assert len(told) == 1
    assert "use_cache" in told[0]
    assert "checkpointing" in told[0]
    assert made.eval()(**given, use_cache=True).cache.get_seq_length() == 4


def test_a_filled_cache_is_refused_while_checkpointing_trains() -> None:
    made, cache = trained(False), new_cache()
    with torch.no_grad():
        # without gradients nothing is computed again
        made(tokens(2, 5), decoder_input_ids=tokens(2, 4), cache=cache)
    assert cache.get_seq_length() == 4
    call = lambda: made(tokens(2, 5), decoder_input_ids=tokens(2, 1), cache=cache)  # noqa: E731
    refuses(call, ValueError, "cache", [4, "checkpointing"])


def test_generation_in_training_mode_uses_its_cache() -> None:
    made = trained(False, **NO_DROPOUT)
    search = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    found = made.generate(tokens(2, 5), **search)
    assert torch.equal(found, made.eval().generate(tokens(2, 5), **search, use_cache=False))
