"""The translation model: its configurations, padding, cached decoding, loss, and how it saves and loads."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from relpos.translation.config import FORMAT, RelposConfig
from relpos.translation.errors import InputError
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.positions import sinusoids

VOCABULARY, PAD, START, END = 40, 0, 1, 2
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_heads": 2, "d_ff": 24}
SIZES |= {"vocab_size": VOCABULARY, "relative_max_distance": 2, "max_positions": 32}
POSITIONS = {
    "relative": {},
    "sinusoidal": {"absolute_positions": "sinusoidal", "relative_max_distance": None},
    "learned": {"absolute_positions": "learned", "relative_max_distance": None},
    "both": {"absolute_positions": "sinusoidal"},
    "neither": {"relative_max_distance": None},
    "per head": {"relative_per_head": True, "relative_max_distance": [3, 1]},
}
positions = pytest.mark.parametrize("kind", POSITIONS)


def model(*, spread: float = 0.6, **settings) -> RelposForConditionalGeneration:
    """A model in evaluation mode and float64 whose weights are large enough to decide something."""
    torch.manual_seed(3)
    made = RelposForConditionalGeneration(RelposConfig(**(SIZES | settings))).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter), alpha=spread / parameter.shape[-1] ** 0.5)
    return made


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows of unequal length, with one column of padding more than needed."""
    width = max(map(len, rows)) + 1
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def assert_close(found: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(found, true, atol=1e-9, rtol=1e-9)


def new_cache() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


@pytest.mark.parametrize("absolute", ["none", "sinusoidal", "learned"])
@pytest.mark.parametrize("relative", [None, 0, 2, [3, 1]])
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("is_per_head", [True, False])
def test_each_row_of_the_papers_tables_is_a_configuration_that_trains(
    absolute, relative, parts, is_per_head
) -> None:
    torch.manual_seed(0)
    settings = SIZES | {"encoder_layers": 1, "decoder_layers": 1, "relative_max_distance": relative}
    settings |= {"relative_keys": parts[0], "relative_values": parts[1], "relative_per_head": is_per_head}
    config = RelposConfig(**settings, absolute_positions=absolute)
    made = RelposForConditionalGeneration(config).train()
    names = [name for name, _ in made.named_parameters()]
    has_tables = relative is not None
    assert sum("relative_position_keys" in name for name in names) == 2 * (has_tables and parts[0])
    assert sum("relative_position_values" in name for name in names) == 2 * (has_tables and parts[1])
    assert sum("embed_positions" in name for name in names) == 2 * (absolute == "learned")
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
    made(tokens(2, 5), labels=tokens(2, 4)).loss.backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []
    optimizer.step()
    for name, parameter in made.named_parameters():
        assert parameter.isfinite().all(), name
        if "relative" in name and relative != 0:
            assert not torch.equal(parameter, before[name]), f"{name} did not move"


@pytest.mark.parametrize("given", [2.5, "16", True, [2], (1, 2, 3), [1, 2.0]])
def test_distances_that_are_no_one_or_two_integers_are_refused(given) -> None:
    with pytest.raises(TypeError, match=f"^relative_max_distance must .*; got {re.escape(repr(given))}"):
        RelposConfig(**SIZES | {"relative_max_distance": given})


def test_decoder_tables_hold_no_row_for_what_the_decoder_never_sees() -> None:
    made = model(relative_max_distance=[3, 2])
    encoder, decoder = made.model.encoder.layers[0].self_attn, made.model.decoder.layers[0].self_attn
    assert encoder.relative_position_keys.shape[0] == 3 + 1 + 2
    assert decoder.relative_position_keys.shape[0] == 3 + 1
    assert made.model.decoder.layers[0].encoder_attn.relative_position_keys is None


@positions
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_through_auto_classes_and_gives_the_same(kind, tied, tmp_path: Path) -> None:
    made = model(**POSITIONS[kind], tie_word_embeddings=tied).float()
    made.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RelposConfig)
    assert config.format == FORMAT
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    loaded, given = loaded.eval(), {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
    assert torch.equal(loaded(**given).logits, made(**given).logits)


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    for load in (AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained):
        with pytest.raises(ValueError, match=rf"format must be at most {FORMAT}; got {FORMAT + 1}\. Upgrade"):
            load(tmp_path)


@positions
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_the_source_changes_nothing(kind, side) -> None:
    made = model(**POSITIONS[kind])
    rows = [tokens(1, n, seed=n)[0] for n in (5, 1, 3)]
    ids, mask = padded(rows, side)
    target = tokens(3, 4)
    found = made(ids, mask, decoder_input_ids=target).logits
    for i, row in enumerate(rows):
        assert_close(found[i : i + 1], made(row[None], decoder_input_ids=target[i : i + 1]).logits)


@positions
@pytest.mark.parametrize("chunks", [(6,), (3, 1, 2)])
def test_padding_before_the_target_changes_nothing(kind, chunks) -> None:
    made = model(**POSITIONS[kind])
    rows = [tokens(1, n, seed=n)[0] for n in (5, 1, 3)]
    ids, mask = padded(rows, "left")
    source, cache, stop, parts = tokens(3, 4), new_cache() if len(chunks) > 1 else None, 0, []
    for chunk in chunks:
        start, stop = stop, stop + chunk
        target = {"decoder_input_ids": ids[:, start:stop], "decoder_attention_mask": mask[:, :stop]}
        parts.append(made(source, **target, cache=cache).logits)
    found = torch.cat(parts, 1)
    for i, row in enumerate(rows):
        assert_close(found[i, -len(row) :], made(source[i : i + 1], decoder_input_ids=row[None]).logits[0])


@positions
def test_labels_padded_on_the_left_have_the_loss_and_gradients_of_those_on_the_right(kind) -> None:
    made, rows = model(**POSITIONS[kind]).eval(), [tokens(1, n)[0] for n in (5, 2, 1)]
    source, found = tokens(3, 6), []
    for side in ("right", "left"):
        ids, mask = padded(rows, side)
        labels = ids.masked_fill(mask == 0, -100)
        given = made.prepare_decoder_input_ids_from_labels(labels)
        for arguments in ({}, {"decoder_input_ids": given}):
            made.zero_grad()
            out = made(source, labels=labels, **arguments)
            out.loss.backward()
            gradients = [parameter.grad.clone() for parameter in made.parameters()]
            found.append((out.loss, out.logits[mask.bool()], gradients))
    for loss, logits, gradients in found[1:]:
        assert_close(logits, found[0][1])
        # the loss is taken in float32
        torch.testing.assert_close(loss, found[0][0])
        for one, other in zip(gradients, found[0][2], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_start_stands_before_the_first_label_on_either_side() -> None:
    made = model()
    start = made.config.decoder_start_token_id
    labels = torch.tensor([[5, 6, 7, -100], [-100, -100, 8, 9], [-100] * 4, [5, -100, 7, 8]])
    assert made.prepare_decoder_input_ids_from_labels(labels).tolist() == [
        [start, 5, 6, 7],
        [PAD, PAD, start, 8],
        [start, PAD, PAD, PAD],
        [start, 5, PAD, 7],
    ]


def test_labels_padded_on_the_right_and_a_prefix_without_labels_get_no_mask(monkeypatch) -> None:
    made, masks = model().eval(), []
    decode = made.model.decoder.forward
    monkeypatch.setattr(
        made.model.decoder,
        "forward",
        lambda *given, **more: (masks.append(given[1]), decode(*given, **more))[1],
    )
    labels = tokens(2, 4)
    made(tokens(2, 5), labels=labels.masked_fill(torch.arange(4) == 3, -100))
    # the first labels are left out of the loss on purpose; their tokens are there
    made(tokens(2, 5), decoder_input_ids=tokens(2, 4), labels=labels.masked_fill(torch.arange(4) < 2, -100))
    assert masks == [None, None]


def test_a_model_takes_tokens_that_were_added_to_its_tokenizer() -> None:
    made = model().eval()
    assert made.model.encoder.embed_tokens.weight is made.lm_head.weight is made.model.shared.weight
    size = made.config.vocab_size
    source, target = tokens(2, 5), tokens(2, 4)
    with torch.no_grad():
        before = made(source, decoder_input_ids=target).logits
    made.resize_token_embeddings(size + 3, mean_resizing=False)
    assert made.config.vocab_size == size + 3
    for side in (made.model.encoder, made.model.decoder):
        assert side.embed_tokens.weight is made.model.shared.weight
    assert made.lm_head.weight is made.model.shared.weight
    after = made(source, decoder_input_ids=target).logits
    torch.testing.assert_close(after[..., :size], before)
    made(torch.full((1, 2), size + 2), labels=torch.full((1, 2), size + 2)).loss.backward()
    assert made.model.shared.weight.grad[size + 2].any()


@pytest.mark.parametrize("kind", ["relative", "sinusoidal"])
def test_an_empty_source_is_its_end_mark_alone_and_works(kind) -> None:
    made = model(**POSITIONS[kind])
    out = made(torch.tensor([[END]]), labels=tokens(1, 3))
    assert out.logits.isfinite().all()
    generated = made.generate(torch.tensor([[END]]), max_new_tokens=4, num_beams=2, early_stopping=False)
    assert 1 < generated.shape[1] <= 5


def test_a_row_of_padding_alone_gives_finite_outputs_and_gradients() -> None:
    made = model().train()
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    out = made(tokens(2, 3), mask, labels=tokens(2, 4))
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


def test_without_positions_the_encoder_does_not_see_the_order_and_with_any_it_does() -> None:
    ids, order = torch.arange(5, 11)[None], torch.tensor([4, 0, 5, 2, 1, 3])
    for kind, settings in POSITIONS.items():
        encoder = model(**settings).model.encoder
        found, true = encoder(ids[:, order])[0], encoder(ids)[0][:, order]
        assert torch.allclose(found, true, atol=1e-9) is (kind == "neither")


def test_an_odd_width_trains() -> None:
    made = model(d_model=15, num_heads=3, absolute_positions="sinusoidal")
    assert made(tokens(2, 4), labels=tokens(2, 3)).loss.isfinite()
    assert sinusoids(torch.arange(4)[None], 3).shape == (1, 4, 3)


def test_learned_positions_end_with_their_sentence_and_relative_ones_do_not_end() -> None:
    learned = model(**POSITIONS["learned"])
    assert learned(tokens(1, 32), decoder_input_ids=tokens(1, 32)).logits.isfinite().all()
    for source, target, last in ((33, 1, 32), (1, 40, 39)):
        # an error that the command line prints as one line, when it is a validation pair that is too long
        with pytest.raises(InputError, match=rf"max_positions = 32.*; got position {last}\."):
            learned(tokens(1, source), decoder_input_ids=tokens(1, target))
    for kind in ("relative", "sinusoidal"):
        out = model(**POSITIONS[kind])(tokens(1, 200), decoder_input_ids=tokens(1, 200))
        assert out.logits.isfinite().all()


@positions
def test_no_later_target_token_reaches_an_earlier_score(kind) -> None:
    made, source, target = model(**POSITIONS[kind]), tokens(1, 4), tokens(1, 6)
    other = target.clone()
    other[:, 3:] = tokens(1, 3, seed=9)
    found, true = (made(source, decoder_input_ids=x).logits[:, :3] for x in (other, target))
    assert torch.equal(found, true)


@positions
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_with_a_cache_equal_one_pass(kind, norm_first, chunk) -> None:
    made = model(**POSITIONS[kind], norm_first=norm_first)
    source, mask = padded([tokens(1, n, seed=n)[0] for n in (6, 2)], "right")
    target, cache, parts = tokens(2, 8), new_cache(), []
    true = made(source, mask, decoder_input_ids=target).logits
    encoded = made.model.encoder(source, mask)
    for part in target.split(chunk, 1):
        out = made(attention_mask=mask, encoder_outputs=encoded, decoder_input_ids=part, cache=cache)
        assert out.cache is cache
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), true)
    assert cache.get_seq_length() == 8


def test_zeroing_a_table_changes_cached_scores_too() -> None:
    source, target = tokens(1, 4), tokens(1, 6)
    for name in ("relative_position_keys", "relative_position_values"):
        made = model()

        def stepwise(made=made) -> Tensor:
            cache = new_cache()
            steps = [made(source, decoder_input_ids=x, cache=cache).logits for x in target.split(1, 1)]
            return torch.cat(steps, 1)

        before = stepwise()
        with torch.no_grad():
            for layer in made.model.decoder.layers:
                getattr(layer.self_attn, name).zero_()
        after = stepwise()
        assert not torch.allclose(before, after)
        assert_close(after, made(source, decoder_input_ids=target).logits)


SEARCHES = {
    "greedy": {"num_beams": 1, "do_sample": False},
    "beam": {"num_beams": 3, "do_sample": False, "length_penalty": 0.6, "early_stopping": False},
    "n best": {"num_beams": 4, "num_return_sequences": 3, "do_sample": False, "early_stopping": False},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
}


@pytest.mark.parametrize("kind", ["both", "learned", "per head"])
@pytest.mark.parametrize("search", SEARCHES)
def test_generation_with_and_without_a_cache_is_the_same(kind, search) -> None:
    # tied embeddings of a model that has learned nothing say each token again
    made = model(**POSITIONS[kind], tie_word_embeddings=False, spread=2.0)
    source, mask = padded([tokens(1, n, seed=n)[0] for n in (6, 2)], "right")
    found = []
    for cache in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(11)
        found.append(
            made.generate(source, attention_mask=mask, max_new_tokens=9, **cache, **SEARCHES[search])
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(found[0][:, 1:].unique()) > 2  # not one token again and again


def test_a_forced_prefix_gives_the_teacher_forced_scores() -> None:
    made, source = model(), tokens(2, 5)
    prefix = torch.cat((torch.full((2, 1), START), tokens(2, 4, seed=3)), 1)
    given = {"decoder_input_ids": prefix, "max_new_tokens": 3, "min_new_tokens": 3}
    greedy = {"do_sample": False, "num_beams": 1, "output_logits": True, "return_dict_in_generate": True}
    out = made.generate(source, **given, **greedy)
    assert torch.equal(out.sequences[:, :5], prefix)
    true = made(source, decoder_input_ids=out.sequences[:, :-1]).logits[:, 4:]
    torch.testing.assert_close(torch.stack(out.logits, 1).to(true), true, atol=1e-5, rtol=1e-5)


def test_a_step_of_generation_projects_one_token() -> None:
    made, counts = model(), []
    attention = made.model.decoder.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda _, given, out: counts.append(given[0].shape[1]))
    for num_beams in (1, 3):
        counts.clear()
        given = {"decoder_input_ids": torch.tensor([[START, 5, 6, 7]]), "do_sample": False}
        made.generate(tokens(1, 5), **given, max_new_tokens=6, min_new_tokens=6, num_beams=num_beams)
        assert counts == [4, 1, 1, 1, 1, 1]


def test_the_config_says_whether_a_call_returns_a_cache_but_for_training() -> None:
    made, given = model(), {"input_ids": tokens(1, 3), "decoder_input_ids": tokens(1, 2)}
    assert made(**given).cache.get_seq_length() == 2
    assert made(**given, use_cache=False).cache is None
    assert made(tokens(1, 3), labels=tokens(1, 2)).cache is None
    assert made.train()(**given).cache is None
    with torch.no_grad():
        assert made(**given).cache.get_seq_length() == 2
    made.config.use_cache = False
    assert made.eval()(**given).cache is None
    assert made(**given, use_cache=True).cache.get_seq_length() == 2


def test_loss_is_the_mean_over_labels_and_leaves_out_what_is_marked() -> None:
    made, source, labels = model(), tokens(2, 5), tokens(2, 4)
    labels[0, 2:] = -100
    out = made(source, labels=labels)
    start = torch.full((2, 1), START)
    shifted = torch.cat((start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)), 1)
    log_probabilities = made(source, decoder_input_ids=shifted).logits.log_softmax(-1)
    kept = labels != -100
    picked = log_probabilities.gather(-1, labels.clamp(min=0)[..., None])[..., 0][kept]
    torch.testing.assert_close(out.loss.double(), -picked.mean(), atol=1e-5, rtol=1e-5)


def test_loss_is_smoothed_only_while_training() -> None:
    settings = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    smooth, plain = (model(**settings, label_smoothing=x) for x in (0.3, 0.0))
    source, labels = tokens(2, 5), tokens(2, 4)
    true = plain(source, labels=labels).loss
    assert torch.equal(smooth.eval()(source, labels=labels).loss, true)
    logits = smooth(source, labels=labels).logits.flatten(0, 1)
    uniform = -logits.log_softmax(-1).mean()
    found = smooth.train()(source, labels=labels).loss
    torch.testing.assert_close(found.double(), 0.7 * true.double() + 0.3 * uniform, atol=1e-5, rtol=1e-5)
    assert torch.equal(plain.train()(source, labels=labels).loss, true)


@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_num_items_in_batch_divides_the_sum(count) -> None:
    made, source, labels = model(), tokens(2, 5), tokens(2, 4)
    found = made(source, labels=labels, num_items_in_batch=count).loss
    torch.testing.assert_close(found * 7, made(source, labels=labels).loss * 8)


def test_labels_that_are_all_left_out_give_zero_and_not_nan() -> None:
    assert model()(tokens(1, 3), labels=torch.full((1, 4), -100)).loss == 0


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_goes_on_from_the_outputs_of_the_encoder(search) -> None:
    made = model(tie_word_embeddings=False, spread=2.0)
    source, mask = padded([tokens(1, n, seed=n)[0] for n in (6, 2)], "right")
    settings = {"attention_mask": mask, "max_new_tokens": 6} | SEARCHES[search]
    torch.manual_seed(11)
    true = made.generate(source, **settings)
    torch.manual_seed(11)
    assert torch.equal(made.generate(encoder_outputs=made.model.encoder(source, mask), **settings), true)


def test_the_loss_compiles_without_a_break_for_two_lengths() -> None:
    made = model(**POSITIONS["both"])
    torch._dynamo.reset()

    def loss(source: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return made(source, mask, labels=labels).loss

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for n in (5, 9):
        arguments = (tokens(2, n), torch.ones(2, n, dtype=torch.long), tokens(2, n + 1))
        torch.testing.assert_close(compiled(*arguments), loss(*arguments))
    torch._dynamo.reset()
