"""How code for all models of transformers calls the model: inputs, masks, outputs, caches, refusals."""

import inspect

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, EncoderDecoderCache, StaticCache

from relpos.translation.config import RelposConfig
from relpos.translation.model import RelposForConditionalGeneration, RelposModel
from relpos.translation.tokenizer import train_tokenizer

VOCABULARY = 40
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_heads": 2, "d_ff": 24}
SIZES |= {"vocab_size": VOCABULARY, "relative_max_distance": 2, "max_positions": 32}


def model(**settings) -> RelposForConditionalGeneration:
    torch.manual_seed(0)
    return RelposForConditionalGeneration(RelposConfig(**(SIZES | settings))).double().eval()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(found, true, atol=1e-9, rtol=1e-9)


SOURCE, TARGET = tokens(2, 5), tokens(2, 4, seed=2)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("absolute", ["none", "sinusoidal", "learned"])
def test_rows_of_the_embeddings_are_taken_in_place_of_ids(absolute) -> None:
    made = model(absolute_positions=absolute)
    true = made(SOURCE, MASK, TARGET).logits
    table = made.get_input_embeddings()
    close(made(attention_mask=MASK, inputs_embeds=table(SOURCE), decoder_input_ids=TARGET).logits, true)
    close(made(SOURCE, MASK, decoder_inputs_embeds=table(TARGET)).logits, true)
    inner = made.model(SOURCE, MASK, decoder_inputs_embeds=table(TARGET))
    close(made.lm_head(inner.last_hidden_state), true)


def test_embeddings_given_generate_what_ids_generate() -> None:
    made = model(tie_word_embeddings=False)
    settings = {"max_new_tokens": 5, "num_beams": 1, "attention_mask": MASK}
    true = made.generate(SOURCE, **settings)
    assert torch.equal(made.generate(inputs_embeds=made.get_input_embeddings()(SOURCE), **settings), true)


def test_arguments_of_other_models_may_be_none_and_misspelt_ones_are_told() -> None:
    made = model()
    nothing = dict.fromkeys(("head_mask", "decoder_head_mask", "cross_attn_head_mask", "position_ids"))
    close(made(SOURCE, MASK, TARGET, **nothing).logits, made(SOURCE, MASK, TARGET).logits)
    for call in (made, made.model):
        with pytest.raises(TypeError, match=r"^head_mask must be None"):
            call(SOURCE, MASK, TARGET, head_mask=torch.ones(2, 2))
        with pytest.raises(TypeError, match=r"^atention_mask must be None.* Did you mean attention_mask\?"):
            call(SOURCE, decoder_input_ids=TARGET, atention_mask=MASK)
    with pytest.raises(TypeError, match=r"^position_ids must be None"):
        made.get_encoder()(SOURCE, position_ids=SOURCE)


def test_strings_that_stop_generation_are_taken(tmp_path) -> None:
    tokenizer = train_tokenizer(["red green blue one two three cat dog"] * 20, 290)
    tokenizer.save_pretrained(tmp_path)
    made = model(vocab_size=len(tokenizer), tie_word_embeddings=False)
    ids = tokenizer(["red green"], return_tensors="pt").input_ids
    free = made.generate(ids, max_new_tokens=8, num_beams=1)
    texts = [tokenizer.decode(token) for token in free[0, 1:]]
    stop = next(text for text in texts[1:] if text.strip())
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    found = made.generate(ids, max_new_tokens=8, num_beams=1, stop_strings=stop, tokenizer=loaded)
    assert found.shape[1] < free.shape[1]
    assert torch.equal(found, free[:, : found.shape[1]])


@pytest.mark.parametrize("is_in_config", [True, False])
def test_weights_and_states_are_returned_when_asked_for(is_in_config) -> None:
    made, asked = model(), {"output_attentions": True, "output_hidden_states": True}
    true = made(SOURCE, MASK, TARGET)
    assert true.encoder_attentions is true.decoder_hidden_states is true.cross_attentions is None
    if is_in_config:
        for name in asked:
            setattr(made.config, name, True)
    out = made(SOURCE, MASK, TARGET, **({} if is_in_config else asked))
    close(out.logits, true.logits)
    assert [list(x.shape) for x in out.encoder_attentions] == [[2, 2, 5, 5]] * 2
    assert [list(x.shape) for x in out.decoder_attentions] == [[2, 2, 4, 4]] * 3
    assert [list(x.shape) for x in out.cross_attentions] == [[2, 2, 4, 5]] * 3
    assert [list(x.shape) for x in out.encoder_hidden_states] == [[2, 5, 16]] * 3
    assert [list(x.shape) for x in out.decoder_hidden_states] == [[2, 4, 16]] * 4
    close(made.lm_head(out.decoder_hidden_states[-1]), true.logits)
    close(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)
    for weights in (*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions):
        close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    assert not out.encoder_attentions[0][1, :, :, 3:].any()
    assert not out.cross_attentions[0][1, :, :, 3:].any()
    assert not out.decoder_attentions[0].triu(1).any()
    if is_in_config:
        assert made(SOURCE, MASK, TARGET, output_attentions=False).encoder_attentions is None


def test_weights_are_those_that_the_outputs_come_from() -> None:
    made = model()
    layer = made.get_encoder().layers[0].self_attn
    seen: list[Tensor] = []
    hook = layer.out_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    (weights,) = made.get_encoder()(SOURCE, output_attentions=True).attentions[:1]
    value: list[Tensor] = []
    layer.v_proj.register_forward_hook(lambda _, given, out: value.append(out))
    made.get_encoder()(SOURCE)
    hook.remove()
    v = value[0].unflatten(-1, (2, 8)).transpose(1, 2)
    places = (torch.arange(5) - torch.arange(5)[:, None]).clamp(-2, 2) + 2
    heads = (weights[..., None] * (v[:, :, None] + layer.relative_position_values[places])).sum(-2)
    close(seen[0], heads.transpose(1, 2).flatten(2))
    close(seen[1], seen[0])


def test_generation_returns_weights_and_states_of_each_step() -> None:
    made = model(tie_word_embeddings=False)
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    out = made.generate(SOURCE, attention_mask=MASK, max_new_tokens=3, min_new_tokens=3, num_beams=1, **asked)
    assert len(out.decoder_attentions) == len(out.cross_attentions) == 3
    assert [list(step[0].shape) for step in out.decoder_attentions] == [[2, 2, 1, n] for n in (1, 2, 3)]
    assert len(out.encoder_attentions) == 2
    assert len(out.encoder_hidden_states) == 3


@pytest.mark.parametrize("is_in_config", [True, False])
def test_tuples_are_returned_when_asked_for(is_in_config) -> None:
    made = model()
    made.config.return_dict = not is_in_config
    given = {} if is_in_config else {"return_dict": False}
    for call in (made, made.model):
        out = call(SOURCE, MASK, TARGET, return_dict=True)
        found = call(SOURCE, MASK, TARGET, **given)
        assert isinstance(found, tuple)
        assert torch.equal(found[0], out[0])
    loss, logits, *_ = made(SOURCE, MASK, labels=TARGET, **given)
    assert loss.dim() == 0
    assert logits.shape == (2, 4, VOCABULARY)
    assert isinstance(made.get_encoder()(SOURCE, **given), tuple)
    assert isinstance(
        made.get_decoder()(TARGET, encoder_hidden_states=out.encoder_last_hidden_state, **given), tuple
    )
    pair = made.get_encoder()(SOURCE, MASK, return_dict=False)
    close(
        made(attention_mask=MASK, encoder_outputs=pair, decoder_input_ids=TARGET, return_dict=True).logits,
        logits_of(made),
    )


def logits_of(made: RelposForConditionalGeneration) -> Tensor:
    return made(SOURCE, MASK, TARGET, return_dict=True).logits


def test_past_key_values_is_the_older_name_of_the_cache() -> None:
    made = model()
    true = made(SOURCE, MASK, TARGET).logits
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    parts = []
    for chunk in TARGET.split((3, 1), 1):
        with pytest.warns(FutureWarning, match="past_key_values"):
            parts.append(made(SOURCE, MASK, chunk, past_key_values=cache).logits)
    close(torch.cat(parts, 1), true)


@pytest.mark.parametrize("kind", ["one side", "static"])
def test_other_caches_of_transformers_give_the_same(kind) -> None:
    made = model()
    true = made(SOURCE, MASK, TARGET).logits
    if kind == "one side":
        cache = DynamicCache()
    else:
        sides = (StaticCache(config=made.config, max_cache_len=n) for n in (9, 7))
        cache = EncoderDecoderCache(*sides)
    with torch.no_grad():
        parts = [made(SOURCE, MASK, x, cache=cache).logits for x in TARGET.split((2, 1, 1), 1)]
    close(torch.cat(parts, 1), true)
    assert int(cache.get_seq_length()) == 4


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("kind", ["bool", "long", "float", "per head"])
def test_masks_of_four_dimensions_say_alone_who_attends_to_whom(kind) -> None:
    made, padding = model(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    true = made(SOURCE, MASK, TARGET, padding).logits
    keep = causal(4)[None, None] & padding.bool()[:, None, None]
    masks = {"bool": keep, "long": keep.long(), "per head": keep.expand(2, 2, 4, 4)}
    masks["float"] = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, float("-inf"))
    close(made(SOURCE, MASK, TARGET, masks[kind]).logits, true)
    source = MASK.bool()[:, None, None].expand(2, 1, 5, 5)
    encoded = made.get_encoder()(SOURCE, source)[0]
    close(encoded[0], made.get_encoder()(SOURCE, MASK)[0][0])
    close(encoded[1, :3], made.get_encoder()(SOURCE, MASK)[0][1, :3])
    # with a source that hides nothing from itself but padding, the target sees the same
    close(made(SOURCE, source, TARGET, padding).logits[0], true[0])
    # a mask that lets a target see what comes after it is heeded
    both = made(SOURCE, MASK, TARGET, torch.ones(2, 1, 4, 4, dtype=torch.bool)).logits
    assert not torch.allclose(both[:, 0], true[:, 0])


def test_the_decoder_has_the_names_of_other_decoders_and_works_without_a_source() -> None:
    made = model()
    names = list(inspect.signature(made.get_decoder().forward).parameters)
    wanted = ["input_ids", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache"]
    assert names[:5] == wanted
    encoded = made.get_encoder()(SOURCE, MASK)[0]
    found = made.get_decoder()(TARGET, encoder_hidden_states=encoded, encoder_attention_mask=MASK)
    close(made.lm_head(found.last_hidden_state), made(SOURCE, MASK, TARGET).logits)
    alone = made.get_decoder()(TARGET, use_cache=True)
    step = made.get_decoder()(TARGET[:, :1], cache=alone.cache)
    assert step.last_hidden_state.shape == (2, 1, 16)
    assert not torch.allclose(alone.last_hidden_state, found.last_hidden_state)


def test_the_model_without_its_output_layer_is_the_base_of_the_whole() -> None:
    made = model()
    assert made.base_model is made.model
    assert isinstance(made.model, RelposModel)
    out = made.model(SOURCE, MASK, TARGET)
    close(out.encoder_last_hidden_state, made.get_encoder()(SOURCE, MASK)[0])
    close(made.lm_head(out.last_hidden_state), made(SOURCE, MASK, TARGET).logits)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_of_the_model_serves_other_words() -> None:
    made = model().requires_grad_(False)

    def scores(source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return made(source, mask, target, use_cache=False).logits

    traced = torch.jit.trace(scores, (SOURCE, MASK, TARGET), check_trace=False)
    others = (tokens(2, 5, seed=7), MASK.flip(0), tokens(2, 4, seed=8))
    close(traced(*others), scores(*others))


ONE = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
EMBEDS = torch.zeros(2, 5, 16, dtype=torch.float64)
REFUSED = {
    "both sources": (
        ONE | {"inputs_embeds": EMBEDS},
        "exactly one of input_ids and inputs_embeds .* got both",
    ),
    "no source": ({"decoder_input_ids": TARGET}, "one of input_ids and inputs_embeds .* got neither"),
    "both targets": (
        ONE | {"decoder_inputs_embeds": EMBEDS},
        "exactly one of decoder_input_ids and decoder_inputs_embeds .* got both",
    ),
    "no target": (
        {"input_ids": SOURCE},
        "exactly one of decoder_input_ids and decoder_inputs_embeds .* got neither",
    ),
    "source and its encoding": (
        ONE | {"encoder_outputs": (EMBEDS,)},
        "encoder_outputs must be None where input_ids or inputs_embeds is given",
    ),
    "cache without use_cache": (
        ONE | {"cache": DynamicCache(), "use_cache": False},
        "use_cache must not be False where a cache is given; got DynamicCache",
    ),
    "mask of rank 1": (ONE | {"attention_mask": MASK[0]}, r"^attention_mask must be .* got \[5\]"),
    "mask of rank 3": (
        ONE | {"decoder_attention_mask": torch.ones(2, 4, 4)},
        r"^decoder_attention_mask must be \[batch, key\] = \[2, 4\].* got \[2, 4, 4\]",
    ),
    "short mask": (
        ONE | {"attention_mask": MASK[:, :4]},
        r"attention_mask must be .* = \[2, 5\].*got \[2, 4\]",
    ),
    "long mask": (ONE | {"attention_mask": torch.ones(2, 6)}, r"attention_mask .* = \[2, 5\].*got \[2, 6\]"),
    "mask beside an encoding": (
        {"encoder_outputs": (EMBEDS,), "decoder_input_ids": TARGET, "attention_mask": MASK[:, :3]},
        r"^attention_mask .* = \[2, 5\].*got \[2, 3\]",
    ),
    "mask of another batch": (
        ONE | {"attention_mask": MASK[[0, 1, 1]]},
        r"attention_mask must be .*got \[3, 5\]",
    ),
    "long label": (
        {"input_ids": SOURCE, "labels": TARGET.clone().fill_(40)},
        "labels must be from 0 to 39, or -100 where there is none; got 40",
    ),
    "negative label": (
        {"input_ids": SOURCE, "labels": TARGET.clone().fill_(-1)},
        "labels must be from 0 to 39, or -100 where there is none; got -1",
    ),
    "flat labels": (
        {"input_ids": SOURCE, "labels": TARGET[0]},
        r"labels must be \[batch, target\]; got \[4\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_combinations_are_refused_with_the_arguments_name(case) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        model()(**given)


def test_ids_and_labels_of_32_bits_are_taken() -> None:
    made = model()
    true = made(SOURCE, MASK, labels=TARGET).loss
    assert torch.equal(made(SOURCE.int(), MASK.int(), labels=TARGET.int()).loss, true)


def test_labels_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"labels must be a tensor of int64; got torch.float32"):
        model()(SOURCE, labels=TARGET.float())
