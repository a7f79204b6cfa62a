"""Observing changes nothing, leaves nothing behind, and sees what the layers compute."""

import math

import pytest
import torch
from torch import Tensor, nn

from relpos.inspection import Observation, observe
from relpos.nn import (
    KeyValueCache,
    RelativeMultiheadAttention,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoderLayer,
)
from relpos.translation.config import RelposConfig
from relpos.translation.model import RelposForConditionalGeneration

WIDTH, HEADS = 8, 2


def _attention(**options: object) -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    settings: dict = {"batch_first": True, "max_distance": 2, "dtype": torch.float64} | options
    return RelativeMultiheadAttention(WIDTH, HEADS, **settings).eval()


def _tokens(length: int = 6, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class _Stack(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings: dict = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "max_distance": 2}
        self.encoder = RelativeTransformerEncoderLayer(WIDTH, HEADS, **settings | options)
        self.decoder = RelativeTransformerDecoderLayer(WIDTH, HEADS, **settings | options)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, self.encoder(source), tgt_is_causal=True)


@pytest.mark.parametrize(
    "options", [{}, {"relative_per_head": True}, {"relative_keys": False}, {"bias": False}]
)
def test_what_is_seen_rebuilds_the_output_of_the_layer(options) -> None:
    attention, x = _attention(**options), _tokens()
    out: list[Tensor] = []
    (seen,) = observe(attention, lambda: out.append(attention(x, x, x, is_causal=True)[0]))
    rel_v = attention.relative_position_values
    assert rel_v is not None
    value = attention._heads(x, x, x, None)[2]
    labels = (torch.arange(6) - torch.arange(6)[:, None]).clamp(-2, 2) + 2
    a_v = rel_v[..., labels, :]  # [query, key, dim] or [heads, query, key, dim]
    heads = (seen.weights[..., None] * (value[:, :, None] + a_v)).sum(-2)
    torch.testing.assert_close(attention.out_proj(heads.transpose(1, 2).flatten(2)), out[0])
    logits = (seen.content_logits + seen.position_logits).masked_fill(~seen.allowed, -math.inf)
    torch.testing.assert_close(logits.softmax(-1), seen.weights)


def test_recording_changes_no_output_and_no_random_draw() -> None:
    model = _Stack(dropout=0.3).train()
    x, y = _tokens().float(), _tokens(5).float()
    torch.manual_seed(7)
    expected = model(x, y)
    after = torch.rand(1)
    out: list[Tensor] = []
    torch.manual_seed(7)
    observe(model, lambda: out.append(model(x, y)))
    assert torch.equal(out[0], expected)
    assert torch.equal(torch.rand(1), after)


def test_layers_without_tables_are_left_out() -> None:
    model = _Stack()
    seen = observe(model, lambda: model(_tokens().float(), _tokens(4).float()))
    assert [one.layer for one in seen] == ["encoder.self_attn", "decoder.self_attn"]
    without = _Stack(max_distance=None)
    assert observe(without, lambda: without(_tokens().float(), _tokens().float())) == []


def test_hooks_are_removed_also_after_an_exception() -> None:
    model = _Stack()
    observe(model, lambda: model(_tokens().float(), _tokens().float()))
    assert _num_hooks(model) == 0

    def fail() -> None:
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        observe(model, fail)
    assert _num_hooks(model) == 0


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_head_that_likes_one_distance_is_seen_to(distance) -> None:
    attention, x = _attention(), _tokens()
    with torch.no_grad():
        # every query is a vector of ones
        attention.in_proj_weight[:WIDTH] = 0.0
        attention.in_proj_bias[:WIDTH] = 1.0
        attention.relative_position_keys.zero_()
        attention.relative_position_keys[2 + distance] = 10.0
    (seen,) = observe(attention, lambda: attention(x, x, x))
    assert (seen.position_by_distance.argmax(-1) == 2 + distance).all()
    assert (seen.weight_by_distance[:, 2 + distance] > 0.8).all()
    torch.testing.assert_close(seen.weight_by_distance.sum(-1), torch.ones(HEADS, dtype=torch.float64))


def test_share_of_the_output_follows_the_norms() -> None:
    attention, x = _attention(), _tokens()
    with torch.no_grad():
        attention.relative_position_values.zero_()
        attention.relative_position_values[0, 0] = 1e9
    (seen,) = observe(attention, lambda: attention(x, x, x))
    assert (seen.position_share[:, 0] > 0.999).all()
    assert not seen.position_share[:, 1:].any()
    assert seen.rel_v_norms is not None
    assert seen.rel_v_norms.tolist() == [[1e9, 0.0, 0.0, 0.0, 0.0]]


def test_padding_counts_in_no_distance() -> None:
    attention, x = _attention(), _tokens(4, batch=1)
    padding = torch.tensor([[False, False, False, False, True, True]])
    longer = torch.cat((x, torch.full((1, 2, WIDTH), 50.0, dtype=torch.float64)), dim=1)
    (alone,) = observe(attention, lambda: attention(x, x, x))
    (padded,) = observe(attention, lambda: attention(longer, longer, longer, key_padding_mask=padding))
    names = ("content_by_distance", "position_by_distance", "weight_by_distance", "position_share")
    for name in ("pairs", *names):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name), equal_nan=True)


def test_sequence_first_layers_are_seen_alike() -> None:
    first, last = _attention(), _attention(batch_first=False)
    x = _tokens()
    (one,) = observe(first, lambda: first(x, x, x))
    y = x.transpose(0, 1)
    (other,) = observe(last, lambda: last(y, y, y))
    torch.testing.assert_close(one.weights, other.weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch_is_seen_as_a_batch_of_one(batch_first) -> None:
    attention = _attention(batch_first=batch_first)
    x, padding = _tokens(batch=1), torch.tensor([[False] * 4 + [True] * 2])
    alone = x[0]
    y = x if batch_first else x.transpose(0, 1)
    (one,) = observe(attention, lambda: attention(alone, alone, alone, padding[0]))
    (batch,) = observe(attention, lambda: attention(y, y, y, padding))
    torch.testing.assert_close(one.weights, batch.weights)
    assert torch.equal(one.pairs, batch.pairs)


def test_steps_with_a_cache_are_the_rows_of_one_pass() -> None:
    attention, x = _attention(), _tokens()
    (whole,) = observe(attention, lambda: attention(x, x, x, is_causal=True))
    cache, out = KeyValueCache(), []

    def step_by_step() -> None:
        for chunk in (x[:, :3], x[:, 3:4], x[:, 4:]):
            out.append(attention(chunk, chunk, chunk, is_causal=True, cache=cache)[0])

    steps = observe(attention, step_by_step)
    assert [step.query_start for step in steps] == [0, 3, 4]
    assert cache.length == 6
    torch.testing.assert_close(torch.cat(out, dim=1), attention(x, x, x, is_causal=True)[0])
    for step in steps:
        rows = slice(step.query_start, step.query_start + step.weights.shape[2])
        torch.testing.assert_close(step.weights, whole.weights[:, :, rows, : step.weights.shape[3]])
    assert torch.equal(sum(step.pairs for step in steps), whole.pairs)


def test_observations_hold_no_graph() -> None:
    attention, x = _attention(), _tokens()
    (seen,) = observe(attention, lambda: attention(x, x, x))
    tensors = [value for value in vars(seen).values() if isinstance(value, Tensor)]
    assert isinstance(seen, Observation)
    assert len(tensors) >= 9
    assert not any(x.requires_grad for x in tensors)


def test_the_translators_model_is_seen_as_it_attends_with_and_without_a_cache() -> None:
    config = RelposConfig(
        **{
            "vocab_size": 40,
            "d_model": 8,
            "num_heads": 2,
            "d_ff": 8,
            "encoder_layers": 1,
            "decoder_layers": 2,
        },
        relative_max_distance=[2, 1],
    )
    torch.manual_seed(0)
    model = RelposForConditionalGeneration(config).double().eval()
    ids, target = torch.randint(3, 40, (2, 5)), torch.randint(3, 40, (2, 4))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    out = []
    seen = observe(
        model,
        lambda: out.append(model(ids, mask, target, output_attentions=True, use_cache=False)),
    )
    layers = ("model.encoder.layers.0", "model.decoder.layers.0", "model.decoder.layers.1")
    assert [one.layer for one in seen] == [f"{name}.self_attn" for name in layers]
    weights = (*out[0].encoder_attentions, *out[0].decoder_attentions)
    for one, true in zip(seen, weights, strict=True):
        torch.testing.assert_close(one.weights, true)
    # padding counts at no distance
    assert seen[0].pairs.sum(-1).tolist() == [5 * 5 + 3 * 3] * 2

    def stepwise() -> None:
        cache = None
        for chunk in target.split((3, 1), 1):
            cache = model(ids, mask, chunk, cache=cache).cache

    last = observe(model, stepwise)[-1]
    assert (last.layer, last.query_start) == ("model.decoder.layers.1.self_attn", 3)
    torch.testing.assert_close(last.weights, weights[2][:, :, 3:])
