"""Numbers of the model and of its hypotheses: formulas, scales, dropout, limits; each held by its own law."""

import math

import pytest
import torch

from relpos.translation.config import RelposConfig
from relpos.translation.generation import Search, Translator, _groups, _settings
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.positions import sinusoids
from relpos.translation.recipe import TranslationSettings
from relpos.translation.tokenizer import train_tokenizer

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def model(seed: int = 0, **settings: object) -> RelposForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2}
    return RelposForConditionalGeneration(RelposConfig(**{**sizes, "d_ff": 32, **settings}))


@pytest.mark.parametrize("d_model", [2, 6, 8, 64])
def test_sinusoids_are_those_of_tensor2tensor(d_model: int) -> None:
    half = d_model // 2
    # wavelengths from 2 pi to 10,000 times that, both ends among them
    rates = [10_000 ** (-i / max(half - 1, 1)) for i in range(half)]
    for position in (0, 1, 7, 100):
        expected = [math.sin(position * x) for x in rates] + [math.cos(position * x) for x in rates]
        found = sinusoids(torch.tensor([position]), d_model)[0].tolist()
        assert found == pytest.approx(expected, abs=1e-5)


def test_embeddings_are_scaled_by_the_root_of_the_width_and_start_with_its_inverse() -> None:
    made = model(vocab_size=2000, relative_max_distance=None, **NO_DROPOUT)
    ids, states = torch.tensor([[5, 9]]), []
    for side in (made.model.encoder, made.model.decoder):
        # what the first layer gets
        states.append(side(ids, output_hidden_states=True).hidden_states[0])
    for x in states:
        assert torch.equal(x, made.model.shared.weight[ids] * 4)
    assert made.model.shared.weight.detach().std().item() == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.parametrize("name", NO_DROPOUT)
def test_each_dropout_acts_while_training_alone(name: str) -> None:
    made = model(**{**NO_DROPOUT, name: 0.5})
    ids = torch.arange(4, 12)[None]
    torch.manual_seed(1)
    plain = made.eval()(ids, labels=ids).logits
    assert torch.equal(made(ids, labels=ids).logits, plain)
    assert not torch.equal(made.train()(ids, labels=ids).logits, plain)
    for side in (made.model.encoder, made.model.decoder):
        layer = side.layers[0]
        dropped = {module.p for module in layer.modules() if isinstance(module, torch.nn.Dropout)}
        assert dropped | {layer.self_attn.dropout} == {0.0, 0.5}


def test_dropout_acts_on_embeddings_of_both_sides() -> None:
    made = model(**{**NO_DROPOUT, "dropout": 0.5}).train()
    ids = torch.arange(4, 44)[None]
    for side in (made.model.encoder, made.model.decoder):
        states = side(ids, output_hidden_states=True).hidden_states[0]
        share = float((states == 0).float().mean())
        assert 0.4 < share < 0.6


def test_norms_stand_before_blocks_and_at_the_end_or_after_blocks() -> None:
    ids = torch.arange(4, 12)[None]
    for norm_first in (True, False):
        made = model(norm_first=norm_first).eval()
        # fresh norms leave mean 0 and variance 1 of whatever comes out of the last of them
        states = made.model.encoder(ids)[0]
        decoded = made.model.decoder(ids, encoder_hidden_states=states)[0]
        for x in (states, decoded):
            torch.testing.assert_close(x.mean(-1), torch.zeros(1, 8), atol=1e-5, rtol=0)
            torch.testing.assert_close(x.var(-1, unbiased=False), torch.ones(1, 8), atol=1e-2, rtol=0)


def test_each_activation_gives_other_outputs() -> None:
    ids = torch.arange(4, 12)[None]
    states = [model(activation=name).eval()(ids, labels=ids).logits for name in ("relu", "gelu", "silu")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(states[one], states[other], atol=1e-4)


def test_tables_are_one_for_all_heads_or_one_for_each() -> None:
    for is_per_head, shape in ((False, (33, 8)), (True, (2, 33, 8))):
        attention = model(relative_per_head=is_per_head).model.encoder.layers[0].self_attn
        assert attention.relative_position_keys.shape == shape
        assert attention.relative_position_values.shape == shape


@pytest.fixture(scope="module")
def endless() -> Translator:
    """A translator that has learned nothing and never ends a hypothesis of its own."""
    texts = [f"{a} {b}" for a in ("red", "green", "blue") for b in ("cat", "dog", "bird")] * 20
    tokenizer = train_tokenizer(texts, 275)
    made = model(vocab_size=len(tokenizer), tie_word_embeddings=False, seed=3)
    with torch.no_grad():
        # below every other score, whatever the state
        made.lm_head.weight[made.config.eos_token_id] = 0
        made.lm_head.weight.mul_(3)
    return Translator(made.eval(), tokenizer)


def test_a_hypothesis_is_as_long_as_its_own_source_lets_it_be(endless: Translator) -> None:
    short, long = "red cat", "green dog " * 8
    for search in (Search(beams=1), Search(beams=3)):
        alone = endless.translate([short], search)[0][0]
        beside = endless.translate([short, long, "blue bird cat"], search)[0][0]
        assert beside.text == alone.text
        assert beside.score == pytest.approx(alone.score, abs=1e-5)
        assert len(endless.translate([long], search)[0][0].text) > len(alone.text)


def test_the_limit_of_new_tokens_depends_on_the_length_of_a_row_alone() -> None:
    lengths = [1, 2, 3, 4, 5, 8, 9, 16, 17, 300]
    expected = {1: 18, 2: 20, 3: 24, 4: 24, 5: 32, 8: 32, 9: 48, 16: 48, 17: 80, 300: 1040}
    found = {lengths[row]: limit for rows, limit in _groups(lengths, 10_000, math.inf) for row in rows}
    assert found == expected
    for length in lengths:
        assert _groups([length], 10_000, math.inf) == [([0], expected[length])]
    assert {limit for _, limit in _groups(lengths, 10_000, 30)} == {18, 20, 24, 30}


def test_a_search_is_by_default_the_papers_and_that_of_recipes() -> None:
    search, recipe = Search(), TranslationSettings()
    assert (search.beams, search.length_penalty) == (recipe.beams, recipe.length_penalty) == (4, 0.6)


def test_a_search_goes_on_while_a_better_hypothesis_may_come() -> None:
    told = _settings(Search(beams=3, length_penalty=1.5))
    assert (told["num_beams"], told["length_penalty"], told["early_stopping"]) == (3, 1.5, False)


def test_sampling_draws_from_the_whole_vocabulary(endless: Translator) -> None:
    torch.manual_seed(1)
    firsts = set()
    generate = endless.model.generate

    def note(**options: object) -> torch.Tensor:
        sequences = generate(**options)
        firsts.update(sequences[:, 1].tolist())
        return sequences

    endless.model.generate = note  # type: ignore[method-assign]
    try:
        endless.translate(["red"], Search(sample=True, n_best=600, temperature=1e3))
    finally:
        del endless.model.generate
    assert len(firsts) > 0.7 * endless.model.config.vocab_size
