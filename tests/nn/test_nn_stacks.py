"""Encoder, decoder and transformer: their laws, their caches, and what they are made of."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from relpos.nn import (
    KeyValueCache,
    RelativeMultiheadAttention,
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
    StaticKeyValueCache,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, INNER, BATCH, TARGET, SOURCE, LAYERS = 16, 2, 24, 3, 9, 6, 2
SIZES = {"dim_feedforward": INNER, "dropout": 0.0, "dtype": torch.float64}
MODES = {
    "none": {},
    "both": {"max_distance": 2},
    "keys": {"max_distance": 2, "relative_values": False},
    "values": {"max_distance": 2, "relative_keys": False},
    "left over right": {"max_distance": (3, 1)},
    "per head": {"max_distance": 2, "relative_per_head": True},
    "k = 0": {"max_distance": 0},
}
modes = pytest.mark.parametrize("mode", MODES)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def transformer(**settings) -> RelativeTransformer:
    torch.manual_seed(0)
    options = SIZES | {"batch_first": True, "max_distance": None} | settings
    return RelativeTransformer(WIDTH, HEADS, LAYERS, LAYERS, **options).eval()


def encoder(**settings) -> RelativeTransformerEncoder:
    made = transformer(**settings).encoder
    assert isinstance(made, RelativeTransformerEncoder)
    return made


def decoder(**settings) -> RelativeTransformerDecoder:
    made = transformer(**settings).decoder
    assert isinstance(made, RelativeTransformerDecoder)
    return made


def padding(length: int, batch: int = BATCH) -> Tensor:
    hidden = torch.zeros(batch, length, dtype=torch.bool)
    hidden[1, :2] = True
    return hidden


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RelativeMultiheadAttention, nn.MultiheadAttention),
        (RelativeTransformerEncoderLayer, nn.TransformerEncoderLayer),
        (RelativeTransformerDecoderLayer, nn.TransformerDecoderLayer),
        (RelativeTransformerEncoder, nn.TransformerEncoder),
        (RelativeTransformerDecoder, nn.TransformerDecoder),
        (RelativeTransformer, nn.Transformer),
    ],
)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_arguments_are_torchs_in_torchs_order_and_more_by_name_alone(ours, theirs, method) -> None:
    found, true = (inspect.signature(getattr(kind, method)).parameters for kind in (ours, theirs))
    assert list(found)[: len(true)] == list(true)
    for name, parameter in found.items():
        if name in true:
            is_activation = name == "activation"  # "relu" and F.relu are one
            assert parameter.kind == true[name].kind
            assert is_activation or parameter.default == true[name].default, name
        else:
            assert parameter.kind == inspect.Parameter.KEYWORD_ONLY


@modes
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("chunks", [[1] * TARGET, [4, 1, 1, 3], [TARGET]])
@pytest.mark.parametrize("capacity", [None, TARGET + 3])
def test_a_decoder_with_caches_equals_one_pass(mode, norm_first, chunks, capacity) -> None:
    ours = decoder(norm_first=norm_first, **MODES[mode])
    tgt, memory = draw(BATCH, TARGET, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=2)
    masks = {"memory_key_padding_mask": padding(SOURCE), "tgt_is_causal": True}
    hidden, found, stop = padding(TARGET), [], 0
    true = ours(tgt, memory, tgt_key_padding_mask=hidden, **masks)
    with torch.no_grad():
        caches, memory_caches = ours.make_caches(batch=None if capacity is None else BATCH, capacity=capacity)
        for part in tgt.split(chunks, 1):
            stop += part.shape[1]
            found.append(
                ours(
                    part,
                    memory,
                    tgt_key_padding_mask=hidden[:, :stop],
                    caches=caches,
                    memory_caches=memory_caches,
                    **masks,
                )
            )
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)
    assert all(cache.length == TARGET for cache in caches)


@modes
@pytest.mark.parametrize("capacity", [None, TARGET])
def test_causal_encoder_layers_with_caches_are_a_language_model_in_steps(mode, capacity) -> None:
    ours, x = encoder(**MODES[mode]), draw(BATCH, TARGET, WIDTH)
    true = ours(x, is_causal=True)
    with torch.no_grad():
        caches = ours.make_caches(batch=None if capacity is None else BATCH, capacity=capacity)
        found = [ours(part, is_causal=True, caches=caches) for part in x.split([5, 1, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)


def test_caches_work_with_the_length_first_and_with_one_sequence() -> None:
    ours = decoder(batch_first=False, max_distance=2)
    tgt, memory = draw(TARGET, BATCH, WIDTH), draw(SOURCE, BATCH, WIDTH, seed=2)
    for x, source in ((tgt, memory), (tgt[:, 0], memory[:, 0])):
        caches, memory_caches = ours.make_caches()
        true = ours(x, source, tgt_is_causal=True)
        found = [
            ours(part, source, tgt_is_causal=True, caches=caches, memory_caches=memory_caches)
            for part in x.split(4)
        ]
        torch.testing.assert_close(torch.cat(found), true, atol=1e-10, rtol=1e-10)


def test_caches_are_made_for_each_layer_and_of_the_kind_asked_for() -> None:
    ours = decoder(max_distance=2)
    caches, memory_caches = ours.make_caches()
    assert [type(x) for x in caches + memory_caches] == [KeyValueCache] * (2 * LAYERS)
    assert [x.is_memory for x in caches + memory_caches] == [False] * LAYERS + [True] * LAYERS
    fixed, _ = ours.make_caches(batch=4, capacity=7)
    assert [type(x) for x in fixed] == [StaticKeyValueCache] * LAYERS
    assert all(x.key.shape == (4, HEADS, 7, WIDTH // HEADS) for x in fixed)
    assert all(x.key.dtype == torch.float64 for x in fixed)
    assert len({id(x) for x in fixed}) == LAYERS
    assert len(encoder().make_caches(batch=4, capacity=7)) == LAYERS


def test_a_causal_mask_and_the_flag_say_the_same() -> None:
    ours, src, tgt = transformer(max_distance=2), draw(BATCH, SOURCE, WIDTH), draw(BATCH, TARGET, WIDTH)
    flags = ours(src, tgt, src_is_causal=True, tgt_is_causal=True)
    # float32 beside float64, as torch's own function makes it
    source, target = (RelativeTransformer.generate_square_subsequent_mask(n) for n in (SOURCE, TARGET))
    masks = ours(src, tgt, source, target)
    both = ours(src, tgt, source, target, src_is_causal=True, tgt_is_causal=True)
    torch.testing.assert_close(masks, flags, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(both, flags, atol=1e-12, rtol=1e-12)
    assert torch.equal(target, nn.Transformer.generate_square_subsequent_mask(TARGET))


def test_layers_of_a_stack_begin_as_copies_and_those_of_a_transformer_differ() -> None:
    layer = RelativeTransformerEncoderLayer(WIDTH, HEADS, **SIZES, max_distance=2)
    stack = RelativeTransformerEncoder(layer, 3)
    for (name, x), (_, y) in zip(
        stack.layers[0].named_parameters(), stack.layers[2].named_parameters(), strict=True
    ):
        assert torch.equal(x, y), name
        assert x is not y
    assert all(x is not y for x in stack.parameters() for y in layer.parameters())
    for part in (encoder(max_distance=2), decoder(max_distance=2, relative_per_head=True)):
        for name, x in part.layers[0].named_parameters():
            if x.dim() > 1:
                assert not torch.equal(x, part.layers[1].get_parameter(name)), name


def test_a_transformer_starts_xavier_uniform_like_torchs() -> None:
    ours = transformer(max_distance=2, relative_per_head=True)
    for name, x in ours.named_parameters():
        if x.dim() > 1:
            bound = (6 / (x.shape[-2] + x.shape[-1])) ** 0.5
            assert 0.5 * bound < x.abs().max() <= bound, name


def test_a_transformer_takes_encoder_and_decoder_as_they_come() -> None:
    first, second = encoder(max_distance=2), decoder(max_distance=(4, 0))
    before = copy.deepcopy(first.state_dict())
    parts = {"custom_encoder": first, "custom_decoder": second}
    ours = RelativeTransformer(WIDTH, HEADS, batch_first=True, **parts, max_distance=None)
    assert ours.encoder is first
    assert ours.decoder is second
    assert all(torch.equal(x, before[name]) for name, x in ours.encoder.state_dict().items())
    src, tgt = draw(BATCH, SOURCE, WIDTH), draw(BATCH, TARGET, WIDTH)
    torch.testing.assert_close(ours(src, tgt), second(tgt, first(src)), atol=0, rtol=0)


def test_an_activation_that_is_a_module_survives_the_copies() -> None:
    for made in (encoder(activation=nn.Tanh()), decoder(activation=nn.Tanh())):
        assert all(isinstance(layer.activation, nn.Tanh) for layer in made.layers)


def test_the_norm_comes_last_and_may_be_missing() -> None:
    layer = RelativeTransformerEncoderLayer(WIDTH, HEADS, **SIZES, batch_first=True, max_distance=2)
    x, norm = draw(BATCH, SOURCE, WIDTH), nn.LayerNorm(WIDTH, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    without = RelativeTransformerEncoder(layer, LAYERS)(x)
    torch.testing.assert_close(RelativeTransformerEncoder(layer, LAYERS, norm)(x), norm(without))


def test_relative_settings_reach_every_layer_and_no_cross_attention() -> None:
    ours = transformer(max_distance=(3, 1), relative_values=False, relative_per_head=True)
    names = [name for name, _ in ours.named_parameters() if "relative_position_" in name]
    assert names == [
        f"{side}.layers.{i}.self_attn.relative_position_keys"
        for side in ("encoder", "decoder")
        for i in range(LAYERS)
    ]
    assert ours.get_parameter(names[0]).shape == (HEADS, 5, WIDTH // HEADS)
    assert not list(ours.buffers())


@pytest.mark.parametrize("length", [0, 1])
def test_a_stack_takes_no_token_and_one(length) -> None:
    ours, tgt = transformer(max_distance=2), draw(BATCH, 4, WIDTH)
    assert ours(draw(BATCH, length, WIDTH), tgt, tgt_is_causal=True).isfinite().all()
    assert ours(tgt, draw(BATCH, length, WIDTH), tgt_is_causal=True).shape == (BATCH, length, WIDTH)
    assert ours(draw(0, 4, WIDTH), draw(0, 2, WIDTH)).shape == (0, 2, WIDTH)
