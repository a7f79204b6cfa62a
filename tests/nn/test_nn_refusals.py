"""Modules refuse wrong arguments by the caller's name for them, with the numbers expected and got.

One whole message of each kind is tested word for word; of the others, the name and the numbers.
"""

import re
from typing import Any

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
)

WIDTH, HEADS, BATCH, QUERIES, KEYS = 16, 4, 2, 5, 7
LAYERS = (RelativeTransformerEncoderLayer, RelativeTransformerDecoderLayer)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def attention(**settings: Any) -> RelativeMultiheadAttention:
    return RelativeMultiheadAttention(WIDTH, HEADS, **{"batch_first": True, "max_distance": None} | settings)


def encoder_layer(**settings: Any) -> RelativeTransformerEncoderLayer:
    return RelativeTransformerEncoderLayer(
        WIDTH, HEADS, 24, **{"batch_first": True, "max_distance": 2} | settings
    )


def decoder_layer(**settings: Any) -> RelativeTransformerDecoderLayer:
    return RelativeTransformerDecoderLayer(
        WIDTH, HEADS, 24, **{"batch_first": True, "max_distance": 2} | settings
    )


def refuses(error: type[Exception], *parts: str) -> Any:
    """The message begins with the first part, and has the others in this order."""
    return pytest.raises(error, match="^" + ".*".join(map(re.escape, parts)))


def in_order(batch_first: bool, *sequences: Tensor) -> list[Tensor]:
    return [x if batch_first else x.transpose(0, 1) for x in sequences]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


QUERY, KEY = draw(BATCH, QUERIES, WIDTH), draw(BATCH, KEYS, WIDTH)


# whole messages: the argument, what it must be, what came, what to do


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_message_of_each_kind(batch_first: bool) -> None:
    ours, padding = attention(batch_first=batch_first), zeros(BATCH, QUERIES)
    query, key = in_order(batch_first, QUERY, KEY)
    shape = "[batch, length, embed_dim]" if batch_first else "[length, batch, embed_dim]"
    order = f"batch_first={batch_first} sets the order of dimensions."
    for given, error, message in (
        (
            (query[0, 0], key, key),
            ValueError,
            f"query must be {shape} or [length, embed_dim]; got [16]. {order}",
        ),
        (
            (query, key, key.double()),
            TypeError,
            "value must have the dtype of the weights = torch.float32; got torch.float64. "
            "Convert one of them with .to(), or use autocast.",
        ),
        (
            (query, key, key, padding),
            ValueError,
            "key_padding_mask must be [batch, key] = [2, 7]; got [2, 5]. Check the sizes and their order.",
        ),
        (
            (query, key, key, padding.byte()),
            TypeError,
            "key_padding_mask must be bool (True = padding) or float (added to the logits); got torch.uint8. "
            "Give mask == 0 if 1 = keep, as in Hugging Face's masks, or mask != 0 if 1 = padding.",
        ),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            ours(*given)


@pytest.mark.parametrize(
    "kind", [RelativeMultiheadAttention, *LAYERS, RelativeTransformer], ids=lambda kind: kind.__name__
)
def test_a_relative_module_without_max_distance_is_refused_and_told_what_to_give(kind) -> None:
    with refuses(
        TypeError, f"max_distance must be given to {kind.__name__}: an integer k", "max_distance=None"
    ):
        kind(WIDTH, HEADS)
    made = kind(WIDTH, HEADS, max_distance=None)
    assert not [name for name, _ in made.named_parameters() if "relative_position_" in name]


def test_the_advice_about_a_mask_of_integers_is_right_for_both_conventions() -> None:
    ours = attention().eval()
    is_token = torch.arange(KEYS) < torch.tensor([KEYS, 3])[:, None]
    true = ours(QUERY, KEY, KEY, ~is_token)
    for mask, convert in ((is_token.long(), "mask == 0"), ((~is_token).long(), "mask != 0")):
        with pytest.raises(TypeError, match=re.escape(convert)):
            ours(QUERY, KEY, KEY, mask)
        torch.testing.assert_close(ours(QUERY, KEY, KEY, mask == 0 if "==" in convert else mask != 0), true)


# attention


def test_sequences_that_do_not_fit_are_refused_by_name() -> None:
    ours = attention()
    nested = torch.nested.nested_tensor([draw(2, WIDTH), draw(3, WIDTH)], layout=torch.jagged)
    for given, error, *parts in (
        (([1], KEY, KEY), TypeError, "query must be a tensor; got list."),
        ((QUERY, KEY[None], KEY), ValueError, "key must be", "[length, kdim]; got [1, 2, 7, 16]."),
        ((QUERY[..., :8], KEY, KEY), ValueError, "query must have the width embed_dim = 16; got 8."),
        ((QUERY, KEY, KEY[..., :3]), ValueError, "value must have the width vdim = 16; got 3."),
        ((QUERY, KEY.to("meta"), KEY), ValueError, "key must be on the device", "= cpu; got meta."),
        ((QUERY.long(), KEY, KEY), TypeError, "query must have the dtype", "float32; got torch.int64."),
        ((QUERY, KEY.to_sparse(), KEY), TypeError, "key must be a dense tensor; got torch.sparse_coo."),
        ((nested,) * 3, TypeError, "query must be a dense tensor; got a nested one."),
        ((QUERY, KEY[0], KEY), ValueError, "key must have as many dimensions as query = 3; got 2."),
        ((QUERY, KEY[:1], KEY[:1]), ValueError, "key must have the batch of query = 2; got 1."),
        ((QUERY, KEY, KEY[:, 1:]), ValueError, "value must have the length of key = 7; got 6."),
    ):
        with refuses(error, *parts):
            ours(*given)
    with refuses(ValueError, "key must have the batch of query = 5; got 7.", "batch_first=False"):
        attention(batch_first=False)(QUERY, KEY, KEY)


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_that_do_not_fit_are_refused_by_name_in_torchs_sense(batch_first) -> None:
    ours, (query, key) = attention(batch_first=batch_first), in_order(batch_first, QUERY, KEY)
    sizes = "attn_mask must be [query, key] = [5, 7] or [batch * heads, query, key] = [8, 5, 7]; got "
    padding = "key_padding_mask must be [batch, key] = [2, 7]; got "
    both = {"attn_mask": torch.zeros(QUERIES, KEYS), "key_padding_mask": torch.zeros(BATCH, KEYS).long()}
    for given, error, *parts in (
        (
            {"attn_mask": zeros(QUERIES, KEYS).long()},
            TypeError,
            "attn_mask must be bool (True = hidden)",
            "int64",
        ),
        (both, TypeError, "key_padding_mask must be bool (True = padding)", "got torch.int64."),
        ({"key_padding_mask": [[False] * KEYS]}, TypeError, "key_padding_mask must be a tensor", "got list."),
        (
            {"attn_mask": zeros(QUERIES, KEYS).to("meta")},
            ValueError,
            "attn_mask must be on",
            "= cpu; got meta.",
        ),
        ({"key_padding_mask": zeros(1, KEYS)}, ValueError, padding + "[1, 7]."),
        ({"key_padding_mask": zeros(KEYS, BATCH)}, ValueError, padding + "[7, 2]."),
        ({"attn_mask": zeros(KEYS, QUERIES)}, ValueError, sizes + "[7, 5]."),
        ({"attn_mask": zeros(BATCH, QUERIES, KEYS)}, ValueError, sizes + "[2, 5, 7]."),
        ({"attn_mask": zeros(BATCH, HEADS, QUERIES, KEYS)}, ValueError, sizes + "[2, 4, 5, 7]."),
        ({"is_causal": None}, TypeError, "is_causal must be True or False; got NoneType."),
    ):
        with refuses(error, *parts):
            ours(query, key, key, **given)
    with refuses(ValueError, "key_padding_mask must be [key] = [7]; got [1, 7]."):
        ours(QUERY[0], KEY[0], KEY[0], zeros(1, KEYS))
    with refuses(ValueError, "attn_mask must be", "[heads, query, key] = [4, 5, 7]; got [2, 5, 7]."):
        ours(QUERY[0], KEY[0], KEY[0], attn_mask=zeros(2, QUERIES, KEYS))


def test_masks_beside_a_cache_count_what_is_held_and_a_refusal_leaves_it_as_it_was() -> None:
    for capacity, allowed in ((None, "[2, 10]"), (12, "[2, 10] or [2, 12]")):
        ours = attention(max_distance=2).requires_grad_(False)
        cache = ours.make_cache(batch=None if capacity is None else BATCH, capacity=capacity)
        ours(QUERY, QUERY, QUERY, cache=cache)
        with refuses(
            ValueError, f"key_padding_mask must be [batch, key] = {allowed}; got [2, 5].", "With a cache"
        ):
            ours(QUERY, QUERY, QUERY, zeros(BATCH, QUERIES), cache=cache)
        assert cache.length == QUERIES


@pytest.mark.parametrize(
    ("settings", "error", "parts"),
    [
        ({"add_bias_kv": True}, ValueError, ["add_bias_kv must be False", "got True."]),
        ({"add_zero_attn": True}, ValueError, ["add_zero_attn must be False", "got True."]),
        ({"backend": "fast"}, ValueError, ["backend must be None or one of", "got 'fast'."]),
        ({"vdim": 0}, ValueError, ["vdim must be at least 1; got 0."]),
        ({"kdim": "8"}, TypeError, ["kdim must be an integer; got str."]),
        ({"dropout": 1.5}, ValueError, ["dropout must be between 0 and 1; got 1.5."]),
        ({"dropout": "a"}, TypeError, ["dropout must be a number; got str."]),
    ],
)
def test_settings_of_attention_are_refused_by_name(settings, error, parts) -> None:
    with refuses(error, *parts):
        attention(**settings)


# layers and stacks


@pytest.mark.parametrize("kind", LAYERS)
def test_settings_of_layers_are_refused_by_name(kind) -> None:
    for settings, error, *parts in (
        ({"nhead": 3}, ValueError, "nhead must divide d_model = 16; got 3."),
        *(({"nhead": heads}, TypeError, "nhead must be an integer; got") for heads in (2.0, "4", True)),
        ({"d_model": 0}, ValueError, "d_model must be at least 1; got 0."),
        ({"dim_feedforward": 0}, ValueError, "dim_feedforward must be at least 1; got 0."),
        ({"dropout": -0.1}, ValueError, "dropout must be between 0 and 1; got -0.1."),
        ({"attention_dropout": 2}, ValueError, "attention_dropout must be between 0 and 1; got 2."),
        ({"activation_dropout": "no"}, TypeError, "activation_dropout must be a number; got str."),
        ({"activation": 3}, TypeError, "activation must be one of ['gelu', 'relu', 'silu']", "got int."),
        ({"max_distance": -1}, ValueError, "max_distance must be at least 0; got -1."),
    ):
        with refuses(error, *parts):
            kind(**{"d_model": WIDTH, "nhead": HEADS, "max_distance": 2} | settings)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_an_encoder_names_its_own_arguments(is_stack, norm_first) -> None:
    layer = encoder_layer(norm_first=norm_first)
    ours = RelativeTransformerEncoder(layer, 2) if is_stack else layer
    name, padding = "mask" if is_stack else "src_mask", "src_key_padding_mask"
    for given, error, *parts in (
        ({"src": KEY[..., :4]}, ValueError, "src must have the width d_model = 16; got 4."),
        ({"src": KEY.double()}, TypeError, "src must have the dtype of the weights = torch.float32; got"),
        (
            {"src": KEY[0, 0]},
            ValueError,
            "src must be [batch, length, d_model] or [length, d_model]; got [16]",
        ),
        ({"src": 1}, TypeError, "src must be a tensor; got int."),
        ({name: KEY.long()}, TypeError, f"{name} must be bool (True = hidden) or float"),
        ({name: KEY}, ValueError, f"{name} must be [query, key] = [7, 7] or [batch * heads, query, key]"),
        ({padding: KEY.byte()}, TypeError, f"{padding} must be bool (True = padding) or float"),
        ({padding: KEY[0]}, ValueError, f"{padding} must be [batch, key] = [2, 7]; got [7, 16]."),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got int."),
    ):
        with refuses(error, *parts):
            ours(**{"src": KEY} | given)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_a_decoder_names_its_own_arguments(is_stack, norm_first) -> None:
    layer = decoder_layer(norm_first=norm_first)
    ours = RelativeTransformerDecoder(layer, 2) if is_stack else layer
    tgt_padding, memory_padding = "tgt_key_padding_mask", "memory_key_padding_mask"
    for given, error, *parts in (
        ({"tgt": QUERY[..., :4]}, ValueError, "tgt must have the width d_model = 16; got 4."),
        ({"memory": KEY.half()}, TypeError, "memory must have the dtype of the weights = torch.float32; got"),
        ({"memory": KEY[:1]}, ValueError, "memory must have the batch of tgt = 2; got 1."),
        ({"memory": KEY[0]}, ValueError, "memory must have as many dimensions as tgt = 3; got 2."),
        ({"tgt_mask": QUERY}, ValueError, "tgt_mask must be [query, key] = [5, 5] or"),
        ({"memory_mask": QUERY}, ValueError, "memory_mask must be [query, key] = [5, 7] or"),
        (
            {tgt_padding: zeros(BATCH, KEYS)},
            ValueError,
            f"{tgt_padding} must be [batch, key] = [2, 5]; got [2, 7].",
        ),
        (
            {memory_padding: zeros(BATCH, QUERIES)},
            ValueError,
            f"{memory_padding} must be [batch, key] = [2, 7]; got [2, 5].",
        ),
        (
            {memory_padding: zeros(BATCH, KEYS).byte()},
            TypeError,
            f"{memory_padding} must be bool (True = padding)",
        ),
        ({"tgt_is_causal": "yes"}, TypeError, "tgt_is_causal must be True or False; got str."),
        ({"memory_is_causal": None}, TypeError, "memory_is_causal must be True or False; got NoneType."),
    ):
        with refuses(error, *parts):
            ours(**{"tgt": QUERY, "memory": KEY} | given)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_stack_refuses_parts_of_another_kind(kind) -> None:
    is_encoder = kind is RelativeTransformerEncoderLayer
    made = RelativeTransformerEncoder if is_encoder else RelativeTransformerDecoder
    layer, name = (encoder_layer(), "encoder_layer") if is_encoder else (decoder_layer(), "decoder_layer")
    for given, found in (
        (nn.TransformerEncoderLayer(WIDTH, HEADS), "a TransformerEncoderLayer"),
        (kind, kind.__name__),
    ):
        with refuses(TypeError, f"{name} must be a {kind.__name__}; got {found}."):
            made(given, 2)
    with refuses(ValueError, "num_layers must be at least 1; got 0."):
        made(layer, 0)
    with refuses(TypeError, "num_layers must be an integer; got float."):
        made(layer, 2.0)
    with refuses(TypeError, "norm must be a module or None; got bool."):
        made(layer, 2, True)


def test_a_transformer_refuses_source_and_target_that_do_not_belong_together() -> None:
    ours = RelativeTransformer(WIDTH, HEADS, 1, 1, 24, batch_first=True, max_distance=2)
    for given, error, *parts in (
        ((KEY, QUERY[:1]), ValueError, "tgt must have the batch of src = 2; got 1.", "batch_first=True"),
        ((KEY, QUERY[0]), ValueError, "tgt must have as many dimensions as src = 3; got 2."),
        ((KEY, None), TypeError, "tgt must be a tensor; got NoneType."),
        ((None, KEY), TypeError, "src must be a tensor; got NoneType."),
        ((KEY, QUERY[..., :3]), ValueError, "tgt must have the width d_model = 16; got 3."),
    ):
        with refuses(error, *parts):
            ours(*given)


# caches


def test_a_decoder_layer_refuses_what_is_no_cache_of_its_own_before_it_fills_one() -> None:
    ours, cache = decoder_layer(), KeyValueCache()
    for given, error, *parts in (
        ({"cache": [cache]}, TypeError, "cache must be a cache of one attention module; got list."),
        ({"cache": cache, "memory_cache": [cache]}, TypeError, "memory_cache must be a cache", "got list."),
        ({"cache": cache, "memory_cache": cache}, ValueError, "memory_cache must be a cache of its own"),
    ):
        with refuses(error, *parts):
            ours(QUERY, KEY, **given)
    assert cache.length == 0


@pytest.mark.parametrize("name", ["caches", "memory_caches"])
def test_a_stack_refuses_caches_that_are_not_one_for_each_layer(name) -> None:
    encoder = RelativeTransformerEncoder(encoder_layer(), 3)
    decoder = RelativeTransformerDecoder(decoder_layer(), 3).eval()
    one, other = (KeyValueCache(is_memory=name == "memory_caches") for _ in range(2))
    for given, error, *parts in (
        ([one], ValueError, f"{name} must have one cache for each layer = 3; got 1."),
        (one, TypeError, f"{name} must be a list of caches; got KeyValueCache."),
        ([None, 3, None], TypeError, f"{name}[1] must be a cache of one attention module; got int."),
        ([one, other, one], ValueError, f"{name}[2] must be a cache of its own", f"{name}[0]."),
    ):
        with refuses(error, *parts):
            decoder(QUERY, KEY, **{name: given})
        if name == "caches":
            with refuses(error, *parts):
                encoder(QUERY, caches=given)
    assert one.length == other.length == 0
    # None is no cache that layers share
    torch.testing.assert_close(decoder(QUERY, KEY, memory_caches=[None] * 3), decoder(QUERY, KEY))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_memory_of_another_length_than_its_cache_holds_is_refused(batch_first) -> None:
    query, key, shorter = in_order(batch_first, QUERY, KEY, KEY[:, 1:])
    ours, cache = attention(batch_first=batch_first), KeyValueCache(is_memory=True)
    ours(query, key, key, cache=cache)
    with refuses(ValueError, "key must have the length held in cache = 7; got 6."):
        ours(query, shorter, shorter, cache=cache)
    layer = decoder_layer(batch_first=batch_first)
    cache, memory_cache = KeyValueCache(), KeyValueCache(is_memory=True)
    layer(query, key, memory_cache=memory_cache)
    with refuses(ValueError, "memory must have the length held in memory_cache = 7; got 6."):
        layer(query, shorter, cache=cache, memory_cache=memory_cache)
    assert cache.length == 0


def test_the_cache_of_another_batch_s_memory_is_refused() -> None:
    ours, cache = attention(), KeyValueCache(is_memory=True)
    ours(QUERY, KEY, KEY, cache=cache)
    with refuses(ValueError, "cache must have the batch size of query = 1; got 2."):
        ours(QUERY[:1], KEY[:1], KEY[:1], cache=cache)
