"""Attention weights of layers and stacks: those of their own attention, where they are asked for."""

from typing import Any

import pytest
import torch
from small_modules import BATCH, HEADS, KEY, KEYS, QUERIES, QUERY, WIDTH, draw, layer, refuses
from torch import Tensor, nn

from relpos.nn import (
    KeyValueCache,
    RelativeMultiheadAttention,
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

LAYERS = 2
PADDING = torch.arange(KEYS) >= torch.tensor([KEYS, 4])[:, None]
FUTURE = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
DECODER_MASKS = {"tgt_mask": FUTURE, "memory_key_padding_mask": PADDING}


def made(kind: type, **settings: Any) -> Any:
    torch.manual_seed(0)
    if kind is RelativeTransformer:
        return kind(WIDTH, HEADS, LAYERS, LAYERS, 24, batch_first=True, max_distance=2, **settings).eval()
    if kind is RelativeTransformerEncoder:
        return kind(layer(RelativeTransformerEncoderLayer, **settings), LAYERS).eval()
    if kind is RelativeTransformerDecoder:
        return kind(layer(RelativeTransformerDecoderLayer, **settings), LAYERS).eval()
    return layer(kind, **settings).eval()


def attended(module: nn.Module, *given: Any, **masks: Any) -> tuple[Any, list[Tensor]]:
    """What `module` returns, and the weights that each attention in it has for the arguments that it got."""
    own: list[Tensor] = []

    def record(attention: nn.Module, args: tuple, kwargs: dict) -> None:
        query, key, value, padding, _, attn_mask, _, is_causal = args
        weights = attention.forward(
            query, key, value, padding, True, attn_mask, average_attn_weights=False, is_causal=is_causal
        )[1]
        own.append(weights)

    handles = [
        x.register_forward_pre_hook(record, with_kwargs=True)
        for x in module.modules()
        if isinstance(x, RelativeMultiheadAttention)
    ]
    out = module(*given, **masks)
    for handle in handles:
        handle.remove()
    return out, own


CASES: list[tuple[type, tuple, dict]] = [
    (RelativeTransformerEncoderLayer, (KEY,), {"src_key_padding_mask": PADDING}),
    (RelativeTransformerDecoderLayer, (QUERY, KEY), DECODER_MASKS),
    (RelativeTransformerEncoder, (KEY,), {"src_key_padding_mask": PADDING}),
    (RelativeTransformerDecoder, (QUERY, KEY), DECODER_MASKS),
    (RelativeTransformer, (KEY, QUERY), DECODER_MASKS | {"src_key_padding_mask": PADDING}),
]
cases = pytest.mark.parametrize(("kind", "given", "masks"), CASES, ids=lambda x: getattr(x, "__name__", ""))


def flat(kind: type, weights: list) -> list[Tensor]:
    """Weights of all attentions in the order in which they run."""
    if kind is RelativeTransformerEncoder:
        return [*weights[0]]
    if kind is RelativeTransformerDecoder:
        return [x for pair in zip(*weights, strict=True) for x in pair]
    if kind is RelativeTransformer:
        return [*weights[0], *flat(RelativeTransformerDecoder, weights[1:])]
    return weights


@cases
@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_that_are_asked_for_are_those_of_each_attention(kind, given, masks, norm_first) -> None:
    module = made(kind, norm_first=norm_first)
    plain = module(*given, **masks)
    assert isinstance(plain, Tensor)
    (out, *weights), own = attended(module, *given, **masks, need_weights=True)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flat(kind, weights), own, atol=1e-6, rtol=1e-6)


@cases
def test_weights_are_by_head_and_their_rows_sum_to_one(kind, given, masks) -> None:
    _, *weights = made(kind)(*given, **masks, need_weights=True)
    keys = {
        RelativeTransformerEncoderLayer: [(KEYS, KEYS)],
        RelativeTransformerDecoderLayer: [(QUERIES, QUERIES), (QUERIES, KEYS)],
        RelativeTransformerEncoder: [(KEYS, KEYS)] * LAYERS,
        RelativeTransformerDecoder: [(QUERIES, QUERIES), (QUERIES, KEYS)] * LAYERS,
        RelativeTransformer: [(KEYS, KEYS)] * LAYERS + [(QUERIES, QUERIES), (QUERIES, KEYS)] * LAYERS,
    }[kind]
    found = flat(kind, weights)
    assert [tuple(x.shape) for x in found] == [(BATCH, HEADS, *size) for size in keys]
    for x in found:
        torch.testing.assert_close(x.sum(-1), torch.ones(x.shape[:3]))


@cases
def test_nothing_asks_attention_for_weights_unless_it_is_told_to(kind, given, masks) -> None:
    asked = []
    module = made(kind)
    for x in module.modules():
        if isinstance(x, RelativeMultiheadAttention):
            x.register_forward_pre_hook(lambda _module, args: asked.append(args[4]))
    module(*given, **masks)
    assert set(asked) == {False}


def test_weights_of_one_sequence_have_no_batch() -> None:
    _, weights = made(RelativeTransformerEncoderLayer)(KEY[0], need_weights=True)
    assert weights.shape == (HEADS, KEYS, KEYS)


def test_weights_of_a_step_with_caches_are_rows_of_the_whole() -> None:
    decoder = made(RelativeTransformerDecoder)
    _, *whole = decoder(QUERY, KEY, tgt_is_causal=True, need_weights=True)
    caches, memory_caches = decoder.make_caches()
    for i in range(QUERIES):
        _, *step = decoder(
            QUERY[:, i : i + 1],
            KEY,
            tgt_is_causal=True,
            caches=caches,
            memory_caches=memory_caches,
            need_weights=True,
        )
        own, memory = (tuple(x[:, :, i : i + 1] for x in side) for side in whole)
        torch.testing.assert_close(step[0], tuple(x[..., : i + 1] for x in own), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(step[1], memory, atol=1e-6, rtol=1e-5)


def test_a_loss_on_the_weights_trains_the_table_of_the_keys() -> None:
    module = made(RelativeTransformerEncoderLayer).train()
    _, weights = module(KEY, need_weights=True)
    weights.square().sum().backward()
    assert module.self_attn.relative_position_keys.grad.any()


@cases
def test_a_wish_for_weights_that_is_no_bool_is_refused(kind, given, masks) -> None:
    with refuses(TypeError, "need_weights must be True or False; got int."):
        made(kind)(*given, **masks, need_weights=1)


def test_a_transformer_with_a_part_of_torchs_gives_no_weights_and_says_so() -> None:
    for name, kind, part in (
        ("encoder", nn.TransformerEncoder, nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True)),
        ("decoder", nn.TransformerDecoder, nn.TransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True)),
    ):
        module = made(RelativeTransformer, **{f"custom_{name}": kind(part, 1)})
        assert module(KEY, QUERY).shape == QUERY.shape
        with refuses(TypeError, f"need_weights must be False unless {name} is a Relative{kind.__name__};"):
            module(KEY, QUERY, need_weights=True)


@cases
def test_weights_come_out_of_a_compiled_graph(kind, given, masks) -> None:
    module = made(kind)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    found, true = (x(*given, **masks, need_weights=True) for x in (compiled, module))
    torch.testing.assert_close(found, true, atol=1e-6, rtol=1e-5)
    torch._dynamo.reset()


def test_a_cache_of_a_layer_goes_with_weights() -> None:
    module, cache = made(RelativeTransformerEncoderLayer), KeyValueCache()
    module(KEY[:, :4], cache=cache)
    _, weights = module(draw(BATCH, 3, WIDTH), cache=cache, need_weights=True)
    assert weights.shape == (BATCH, HEADS, 3, KEYS)
