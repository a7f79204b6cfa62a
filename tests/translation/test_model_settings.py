"""Settings of the model that are off by default: epsilon, output bias, two vocabularies, a tied table."""

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoints import TEXTS, refusal, small_model
from torch import Tensor, nn

from relpos.translation.config import RelposConfig
from relpos.translation.generation_settings import read_generation_settings
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import train_tokenizer

SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_heads": 2, "d_ff": 24}
SIZES |= {"vocab_size": 30, "relative_max_distance": 2, "max_positions": 32}
WEIGHTS = "model.safetensors"


def model(**settings) -> RelposForConditionalGeneration:
    torch.manual_seed(0)
    return RelposForConditionalGeneration(RelposConfig(**(SIZES | settings))).double().eval()


def tokens(most: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, most, (2, length), generator=torch.Generator().manual_seed(seed))


def logits(of: RelposForConditionalGeneration) -> Tensor:
    return of(tokens(30, 5), decoder_input_ids=tokens(20, 4)).logits


def close(found: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-9)


def saved(of: RelposForConditionalGeneration, folder) -> RelposForConditionalGeneration:
    """The model after it was saved and loaded."""
    of.save_pretrained(folder)
    return RelposForConditionalGeneration.from_pretrained(folder).eval()


def test_the_settings_are_off_by_default() -> None:
    config = RelposConfig()
    assert (config.layer_norm_eps, config.output_bias) == (1e-5, False)
    assert (config.target_vocab_size, config.relative_tied) == (None, False)
    given = RelposConfig(**SIZES).to_dict()
    for name in ("layer_norm_eps", "output_bias", "target_vocab_size", "relative_tied"):
        del given[name]
    assert RelposConfig(**given).to_dict() == RelposConfig(**SIZES).to_dict()


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_epsilon_reaches_every_layer_norm(norm_first, tmp_path) -> None:
    made = model(layer_norm_eps=0.25, norm_first=norm_first)
    norms = [module for module in made.modules() if isinstance(module, nn.LayerNorm)]
    # two in an encoder layer, three in a decoder layer, and with norm_first one after each side
    assert len(norms) == 2 * 2 + 2 * 3 + 2 * norm_first
    assert {norm.eps for norm in norms} == {0.25}
    loaded = saved(made, tmp_path)
    assert loaded.config.layer_norm_eps == 0.25
    close(logits(loaded), logits(made))
    assert (logits(model(norm_first=norm_first)) - logits(made)).abs().max() > 1e-3


@pytest.mark.parametrize("bound", [0, 1])
def test_the_bounds_of_the_epsilon_are_allowed(bound) -> None:
    assert torch.isfinite(logits(model(layer_norm_eps=bound))).all()


def test_the_output_bias_begins_as_zeros_and_is_added_to_the_logits(tmp_path) -> None:
    made = model(output_bias=True)
    assert torch.equal(made.lm_head.bias, torch.zeros(30, dtype=torch.float64))
    true = logits(made)
    close(true, logits(model()))
    bias = torch.arange(30.0, dtype=torch.float64)
    made.lm_head.bias.data.copy_(bias)
    torch.testing.assert_close(logits(made), true + bias)
    torch.testing.assert_close(logits(saved(made, tmp_path)), true + bias)
    assert model().lm_head.bias is None


def test_the_output_bias_is_trained() -> None:
    made = model(output_bias=True)
    labels = tokens(30, 4)
    out = made(tokens(30, 5), labels=labels)
    out.loss.backward()
    # of the mean cross-entropy: the mean probability, less the share of the label
    shares = torch.nn.functional.one_hot(labels, 30).double().mean((0, 1))
    torch.testing.assert_close(made.lm_head.bias.grad, out.logits.softmax(-1).mean((0, 1)) - shares)


def two_vocabularies(**settings) -> RelposForConditionalGeneration:
    return model(target_vocab_size=20, **settings)


def test_source_and_target_have_embeddings_of_their_own(tmp_path) -> None:
    made = two_vocabularies()
    assert made.model.encoder.embed_tokens.weight.shape == (30, 16)
    assert made.model.decoder.embed_tokens.weight.shape == (20, 16)
    assert made.lm_head.weight is made.model.decoder.embed_tokens.weight
    assert made.get_input_embeddings() is made.model.encoder.embed_tokens
    assert logits(made).shape == (2, 4, 20)
    loaded = saved(made, tmp_path)
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    close(logits(loaded), logits(made))


def test_untied_a_model_of_two_vocabularies_has_three_tables(tmp_path) -> None:
    made = two_vocabularies(tie_word_embeddings=False)
    assert made.lm_head.weight is not made.model.decoder.embed_tokens.weight
    assert {"lm_head.weight", "model.decoder.embed_tokens.weight"} < saved(made, tmp_path).state_dict().keys()
    close(logits(saved(made, tmp_path)), logits(made))


def test_two_vocabularies_of_equal_tables_are_one() -> None:
    one, two = model(), model(target_vocab_size=30)
    weights = dict(one.state_dict())
    shared = weights.pop("model.shared.weight")
    two.load_state_dict(weights)
    assert torch.equal(two.model.encoder.embed_tokens.weight, shared)
    close(logits(two), logits(one))


def test_labels_are_of_the_target_vocabulary() -> None:
    made = two_vocabularies()
    labels = torch.tensor([[5, 19], [4, -100]])
    assert made(tokens(30, 5), labels=labels).loss.isfinite()
    with pytest.raises(ValueError, match=r"^labels must be from 0 to 19, or -100 .*; got 20\."):
        made(tokens(30, 5), labels=labels + (labels == 19))


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "decoder_start_token_id", "pad_token_id"])
@pytest.mark.parametrize(("source", "target"), [(30, 20), (20, 30)])
def test_special_tokens_are_of_the_target_and_padding_of_both(name, source, target) -> None:
    last = (20 if name == "pad_token_id" else target) - 1
    sizes = {"vocab_size": source, "target_vocab_size": target}
    assert getattr(RelposConfig(**SIZES | sizes | {name: last}), name) == last
    with pytest.raises(ValueError, match=rf"^{name} must be .* from 0 to {last}\b.*; got {last + 1}\."):
        RelposConfig(**SIZES | sizes | {name: last + 1})


@pytest.mark.parametrize("beams", [1, 3, 20])
def test_a_model_of_two_vocabularies_generates(beams) -> None:
    found = two_vocabularies().generate(tokens(30, 5), num_beams=beams, max_new_tokens=4, min_new_tokens=4)
    assert found.shape == (2, 5)
    assert found.max() < 20


def test_beams_of_a_folder_end_at_the_target_vocabulary(tmp_path) -> None:
    config = two_vocabularies().config
    for beams in (20, 21):
        (tmp_path / "generation_config.json").write_text(f'{{"num_beams": {beams}}}')
        if beams == 20:
            assert read_generation_settings(tmp_path, config).num_beams == 20
            continue
        with pytest.raises(ValueError, match=r"num_beams must be a whole number from 1 to 20, .*; got 21\."):
            read_generation_settings(tmp_path, config)


def test_the_commands_refuse_two_vocabularies_since_they_have_one_tokenizer(tmp_path) -> None:
    small_model(target_vocab_size=290).save_pretrained(tmp_path)
    train_tokenizer(TEXTS, 270).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        f"{tmp_path}: target_vocab_size must be null, since relpos's commands use one tokenizer for both "
        "languages; got 290. Load it with transformers."
    )


@pytest.mark.parametrize("per_head", [True, False])
def test_a_tied_table_is_one_parameter_and_equals_two_equal_tables(per_head, tmp_path) -> None:
    tied, untied = (model(relative_tied=value, relative_per_head=per_head) for value in (True, False))
    kinds = ("relative_position_keys", "relative_position_values")
    for side in ("encoder", "decoder"):
        attention = tied.get_submodule(f"model.{side}.layers.1.self_attn")
        assert attention.relative_position_keys is not None
        assert attention.relative_position_values is None
    weights = dict(tied.state_dict())
    assert not any(name.endswith(kinds[1]) for name in weights)
    tables = [name for name in weights if name.endswith(kinds[0])]
    assert len(tables) == 4
    weights |= {name.replace(kinds[0], kinds[1]): weights[name] for name in tables}
    untied.load_state_dict(weights)
    close(logits(tied), logits(untied))
    for each in (tied, untied):
        logits(each).square().sum().backward()
    for name in tables:
        both = [untied.get_parameter(name.replace(kinds[0], kind)).grad for kind in kinds]
        assert both[1].abs().max() > 1e-6
        torch.testing.assert_close(tied.get_parameter(name).grad, both[0] + both[1])
    loaded = saved(tied, tmp_path)
    assert not any(name.endswith(kinds[1]) for name in load_file(tmp_path / WEIGHTS))
    close(logits(loaded), logits(tied))


def test_weights_with_a_table_for_values_do_not_fit_a_tied_model(tmp_path) -> None:
    model().save_pretrained(tmp_path)
    told = r"weights unknown: model\.decoder\.layers\.0\.self_attn\.relative_position_values, "
    with pytest.raises(ValueError, match=told):
        RelposForConditionalGeneration.from_pretrained(tmp_path, relative_tied=True)
