"""What modules refuse, and in which words: the argument, what it must be, what came, what to do."""

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


def refuses(error: type[Exception], sentence: str) -> Any:
    """The whole message, word for word."""
    return pytest.raises(error, match=rf"^{re.escape(sentence)}$")


QUERY, KEY = draw(BATCH, QUERIES, WIDTH), draw(BATCH, KEYS, WIDTH)
SEQUENCES: dict[str, tuple[tuple, type[Exception], str]] = {
    "kind": (([1], KEY, KEY), TypeError, "query must be a tensor; got list. Make it a tensor."),
    "rank 1": (
        (QUERY[0, 0], KEY, KEY),
        ValueError,
        "query must be [batch, length, embed_dim] or [length, embed_dim]; got [16]. "
        "It is batch_first=True that decides the order.",
    ),
    "rank 4": (
        (QUERY, KEY[None], KEY),
        ValueError,
        "key must be [batch, length, kdim] or [length, kdim]; got [1, 2, 7, 16]. "
        "It is batch_first=True that decides the order.",
    ),
    "width": (
        (QUERY[..., :8], KEY, KEY),
        ValueError,
        "query must have the width embed_dim = 16; got 8. Check what comes before, or the module's sizes.",
    ),
    "width of value": (
        (QUERY, KEY, KEY[..., :3]),
        ValueError,
        "value must have the width vdim = 16; got 3. Check what comes before, or the module's sizes.",
    ),
    "device": (
        (QUERY, KEY.to("meta"), KEY),
        ValueError,
        "key must be on the device of the weights = cpu; got meta. Move one of them with .to().",
    ),
    "dtype": (
        (QUERY, KEY, KEY.double()),
        TypeError,
        "value must have the dtype of the weights = torch.float32; got torch.float64. "
        "Convert one of them with .to(), or use autocast.",
    ),
    "integers": (
        (QUERY.long(), KEY, KEY),
        TypeError,
        "query must have the dtype of the weights = torch.float32; got torch.int64. "
        "Convert one of them with .to(), or use autocast.",
    ),
    "layout": (
        (QUERY, KEY.to_sparse(), KEY),
        TypeError,
        "key must be a dense tensor; got torch.sparse_coo. Pad it, and give a padding mask.",
    ),
    "only one is a batch": (
        (QUERY, KEY[0], KEY),
        ValueError,
        "key must have the dimensions of query = 3; got 2. Give batches, or single sequences.",
    ),
    "batch": (
        (QUERY, KEY[:1], KEY[:1]),
        ValueError,
        "key must have the batch of query = 2; got 1. "
        "It is batch_first=True that decides which dimension that is.",
    ),
    "length of value": (
        (QUERY, KEY, KEY[:, 1:]),
        ValueError,
        "value must have the length of key = 7; got 6. Each key stands for one value.",
    ),
}


@pytest.mark.parametrize("fault", SEQUENCES)
def test_sequences_that_do_not_fit_are_refused_by_name(fault) -> None:
    given, error, sentence = SEQUENCES[fault]
    with refuses(error, sentence):
        attention()(*given)


def test_the_order_of_dimensions_is_told_as_the_module_has_it() -> None:
    with refuses(
        ValueError,
        "query must be [length, batch, embed_dim] or [length, embed_dim]; got [16]. "
        "It is batch_first=False that decides the order.",
    ):
        attention(batch_first=False)(*[draw(WIDTH)] * 3)
    with refuses(
        ValueError,
        "key must have the batch of query = 5; got 7. "
        "It is batch_first=False that decides which dimension that is.",
    ):
        attention(batch_first=False)(QUERY, KEY, KEY)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([draw(2, WIDTH), draw(3, WIDTH)], layout=torch.jagged)
    with refuses(
        TypeError, "query must be a dense tensor; got a nested one. Pad it, and give a padding mask."
    ):
        attention()(nested, nested, nested)


SIZES = "Check its sizes and their order."
HELD = "With a cache, `key` counts all tokens held."
MASKS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "padding of integers": (
        {"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.uint8)},
        TypeError,
        "key_padding_mask must be bool (True = padding) or float (added to the logits); got torch.uint8. "
        "Give mask == 0 where 1 = keep, as in Hugging Face's masks, and mask != 0 where 1 = padding.",
    ),
    "mask of integers": (
        {"attn_mask": torch.zeros(QUERIES, KEYS, dtype=torch.int64)},
        TypeError,
        "attn_mask must be bool (True = hidden) or float (added to the logits); got torch.int64. "
        "Give mask == 0 where 1 = keep, as in Hugging Face's masks, and mask != 0 where 1 = hidden.",
    ),
    "integers beside a float mask": (
        {"attn_mask": torch.zeros(QUERIES, KEYS), "key_padding_mask": torch.zeros(BATCH, KEYS).long()},
        TypeError,
        "key_padding_mask must be bool (True = padding) or float (added to the logits); got torch.int64. "
        "Give mask == 0 where 1 = keep, as in Hugging Face's masks, and mask != 0 where 1 = padding.",
    ),
    "kind": (
        {"key_padding_mask": [[False] * KEYS]},
        TypeError,
        "key_padding_mask must be a tensor or None; got list. Make it a tensor.",
    ),
    "device": (
        {"attn_mask": torch.zeros(QUERIES, KEYS, device="meta")},
        ValueError,
        "attn_mask must be on the device of what it masks = cpu; got meta. Move it with .to().",
    ),
    "padding of another length": (
        {"key_padding_mask": torch.zeros(BATCH, QUERIES).bool()},
        ValueError,
        f"key_padding_mask must be [batch, key] = [2, 7]; got [2, 5]. {SIZES}",
    ),
    "padding of another batch": (
        {"key_padding_mask": torch.zeros(1, KEYS).bool()},
        ValueError,
        f"key_padding_mask must be [batch, key] = [2, 7]; got [1, 7]. {SIZES}",
    ),
    "padding that is turned": (
        {"key_padding_mask": torch.zeros(KEYS, BATCH).bool()},
        ValueError,
        f"key_padding_mask must be [batch, key] = [2, 7]; got [7, 2]. {SIZES}",
    ),
    "mask that is turned": (
        {"attn_mask": torch.zeros(KEYS, QUERIES).bool()},
        ValueError,
        "attn_mask must be [query, key] = [5, 7] or [batch * heads, query, key] = [8, 5, 7]; got [7, 5]. "
        + SIZES,
    ),
    "mask for each sequence alone": (
        {"attn_mask": torch.zeros(BATCH, QUERIES, KEYS).bool()},
        ValueError,
        "attn_mask must be [query, key] = [5, 7] or [batch * heads, query, key] = [8, 5, 7]; got [2, 5, 7]. "
        + SIZES,
    ),
    "mask of four dimensions": (
        {"attn_mask": torch.zeros(BATCH, HEADS, QUERIES, KEYS).bool()},
        ValueError,
        "attn_mask must be [query, key] = [5, 7] or [batch * heads, query, key] = [8, 5, 7]; "
        f"got [2, 4, 5, 7]. {SIZES}",
    ),
    "is_causal": (
        {"is_causal": None},
        TypeError,
        "is_causal must be True or False; got NoneType. Give a bool.",
    ),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("fault", MASKS)
def test_masks_that_do_not_fit_are_refused_by_name_in_torchs_sense(fault, batch_first) -> None:
    given, error, sentence = MASKS[fault]
    query, key = (x if batch_first else x.transpose(0, 1) for x in (QUERY, KEY))
    with refuses(error, sentence):
        attention(batch_first=batch_first)(query, key, key, **given)


def test_masks_of_one_sequence_have_no_batch() -> None:
    with refuses(ValueError, f"key_padding_mask must be [key] = [7]; got [1, 7]. {SIZES}"):
        attention()(QUERY[0], KEY[0], KEY[0], torch.zeros(1, KEYS).bool())
    with refuses(
        ValueError,
        "attn_mask must be [query, key] = [5, 7] or [heads, query, key] = [4, 5, 7]; got [2, 5, 7]. " + SIZES,
    ):
        attention()(QUERY[0], KEY[0], KEY[0], attn_mask=torch.zeros(2, QUERIES, KEYS))


def test_masks_beside_a_cache_count_what_is_held_and_a_refusal_leaves_it_as_it_was() -> None:
    for capacity, allowed in ((None, "[2, 10]"), (12, "[2, 10] or [2, 12]")):
        ours = attention(max_distance=2).requires_grad_(False)
        cache = ours.make_cache(batch=None if capacity is None else BATCH, capacity=capacity)
        ours(QUERY, QUERY, QUERY, cache=cache)
        with refuses(ValueError, f"key_padding_mask must be [batch, key] = {allowed}; got [2, 5]. {HELD}"):
            ours(QUERY, QUERY, QUERY, torch.zeros(BATCH, QUERIES).bool(), cache=cache)
        assert cache.length == QUERIES


SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "appended bias": (
        {"add_bias_kv": True},
        ValueError,
        "add_bias_kv must be False, since a key appended to all others has no position; got True. "
        "Leave it out, or use torch.nn.MultiheadAttention.",
    ),
    "appended zeros": (
        {"add_zero_attn": True},
        ValueError,
        "add_zero_attn must be False, since a key appended to all others has no position; got True. "
        "Leave it out, or use torch.nn.MultiheadAttention.",
    ),
    "backend": (
        {"backend": "fast"},
        ValueError,
        "backend must be None or one of triton, cpu, merged, dense, reference; got 'fast'. "
        "Leave it out to let relpos choose.",
    ),
    "no width": ({"vdim": 0}, ValueError, "vdim must be at least 1; got 0. Give a larger one."),
    "width of text": ({"kdim": "8"}, TypeError, "kdim must be an integer; got str. Give a whole number."),
    "dropout": (
        {"dropout": 1.5},
        ValueError,
        "dropout must be between 0 and 1; got 1.5. It is a probability.",
    ),
    "dropout of text": (
        {"dropout": "a"},
        TypeError,
        "dropout must be a number; got str. It is a probability.",
    ),
}


@pytest.mark.parametrize("fault", SETTINGS)
def test_settings_of_attention_are_refused_by_name(fault) -> None:
    settings, error, sentence = SETTINGS[fault]
    with refuses(error, sentence):
        attention(**settings)


@pytest.mark.parametrize(
    "kind", [RelativeMultiheadAttention, *LAYERS, RelativeTransformer], ids=lambda kind: kind.__name__
)
def test_a_relative_module_without_max_distance_is_refused_and_told_what_to_give(kind) -> None:
    with refuses(
        TypeError,
        f"max_distance must be given to {kind.__name__}: an integer k, or two integers "
        "(left, right), in tokens, beyond which distances share one row. "
        "Give max_distance=None for no relative positions, as in cross-attention.",
    ):
        kind(WIDTH, HEADS)
    made = kind(WIDTH, HEADS, max_distance=None)
    assert not [name for name, _ in made.named_parameters() if "relative_position_" in name]


@pytest.mark.parametrize(("heads", "found"), [(2.0, "float"), ("4", "str"), (True, "bool")])
def test_heads_that_are_no_number_are_refused(heads, found) -> None:
    with refuses(TypeError, f"num_heads must be an integer; got {found}. Give a whole number."):
        RelativeMultiheadAttention(WIDTH, heads, max_distance=2)
    for kind in LAYERS:
        with refuses(TypeError, f"nhead must be an integer; got {found}. Give a whole number."):
            kind(WIDTH, heads, max_distance=2)


LAYER_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads": ({"nhead": 3}, ValueError, "nhead must divide d_model = 16; got 3. Change one of them."),
    "width": ({"d_model": 0}, ValueError, "d_model must be at least 1; got 0. Give a larger one."),
    "inner width": (
        {"dim_feedforward": 0},
        ValueError,
        "dim_feedforward must be at least 1; got 0. Give a larger one.",
    ),
    "dropout": (
        {"dropout": -0.1},
        ValueError,
        "dropout must be between 0 and 1; got -0.1. It is a probability.",
    ),
    "attention_dropout": (
        {"attention_dropout": 2},
        ValueError,
        "attention_dropout must be between 0 and 1; got 2. It is a probability.",
    ),
    "activation_dropout": (
        {"activation_dropout": "no"},
        TypeError,
        "activation_dropout must be a number; got str. It is a probability.",
    ),
    "activation": (
        {"activation": 3},
        TypeError,
        "activation must be one of ['gelu', 'relu', 'silu'] or a function; got int. Give one of these.",
    ),
    "distance": (
        {"max_distance": -1},
        ValueError,
        "max_distance must be at least 0; got -1. It counts tokens: left before the query, right after it.",
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("fault", LAYER_SETTINGS)
def test_settings_of_layers_are_refused_by_name(kind, fault) -> None:
    settings, error, sentence = LAYER_SETTINGS[fault]
    with refuses(error, sentence):
        kind(**{"d_model": WIDTH, "nhead": HEADS, "max_distance": 2} | settings)


def encoder_layer(**settings: Any) -> RelativeTransformerEncoderLayer:
    return RelativeTransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, max_distance=2, **settings)


def decoder_layer(**settings: Any) -> RelativeTransformerDecoderLayer:
    return RelativeTransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True, max_distance=2, **settings)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_an_encoder_names_its_own_arguments(is_stack, norm_first) -> None:
    layer = encoder_layer(norm_first=norm_first)
    ours = RelativeTransformerEncoder(layer, 2) if is_stack else layer
    name, padding = "mask" if is_stack else "src_mask", "src_key_padding_mask"
    for given, error, sentence in (
        ({"src": KEY[..., :4]}, ValueError, "src must have the width d_model = 16; got 4. Check what comes"),
        ({"src": KEY.double()}, TypeError, "src must have the dtype of the weights = torch.float32; got"),
        (
            {"src": KEY[0, 0]},
            ValueError,
            "src must be [batch, length, d_model] or [length, d_model]; got [16]",
        ),
        ({"src": 1}, TypeError, "src must be a tensor; got int. Make it a tensor."),
        (
            {name: KEY.long()},
            TypeError,
            f"{name} must be bool (True = hidden) or float (added to the logits)",
        ),
        ({name: KEY}, ValueError, f"{name} must be [query, key] = [7, 7] or [batch * heads, query, key]"),
        ({padding: KEY.byte()}, TypeError, f"{padding} must be bool (True = padding) or float"),
        ({padding: KEY[0]}, ValueError, f"{padding} must be [batch, key] = [2, 7]; got [7, 16]."),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got int. Give a bool."),
    ):
        with pytest.raises(error, match=rf"^{re.escape(sentence)}"):
            ours(**{"src": KEY} | given)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_a_decoder_names_its_own_arguments(is_stack, norm_first) -> None:
    layer = decoder_layer(norm_first=norm_first)
    ours = RelativeTransformerDecoder(layer, 2) if is_stack else layer
    for given, error, sentence in (
        (
            {"tgt": QUERY[..., :4]},
            ValueError,
            "tgt must have the width d_model = 16; got 4. Check what comes",
        ),
        ({"memory": KEY.half()}, TypeError, "memory must have the dtype of the weights = torch.float32; got"),
        (
            {"memory": KEY[:1]},
            ValueError,
            "memory must have the batch of tgt = 2; got 1. It is batch_first=True",
        ),
        ({"memory": KEY[0]}, ValueError, "memory must have the dimensions of tgt = 3; got 2. Give batches"),
        (
            {"tgt_mask": QUERY},
            ValueError,
            "tgt_mask must be [query, key] = [5, 5] or [batch * heads, query, key]",
        ),
        ({"memory_mask": QUERY}, ValueError, "memory_mask must be [query, key] = [5, 7] or [batch * heads"),
        (
            {"tgt_key_padding_mask": torch.zeros(BATCH, KEYS).bool()},
            ValueError,
            "tgt_key_padding_mask must be [batch, key] = [2, 5]; got [2, 7].",
        ),
        (
            {"memory_key_padding_mask": torch.zeros(BATCH, QUERIES).bool()},
            ValueError,
            "memory_key_padding_mask must be [batch, key] = [2, 7]; got [2, 5].",
        ),
        (
            {"memory_key_padding_mask": torch.zeros(BATCH, KEYS).byte()},
            TypeError,
            "memory_key_padding_mask must be bool (True = padding) or float",
        ),
        ({"tgt_is_causal": "yes"}, TypeError, "tgt_is_causal must be True or False; got str. Give a bool."),
        ({"memory_is_causal": None}, TypeError, "memory_is_causal must be True or False; got NoneType."),
    ):
        with pytest.raises(error, match=rf"^{re.escape(sentence)}"):
            ours(**{"tgt": QUERY, "memory": KEY} | given)


def test_a_decoder_layer_refuses_what_is_no_cache_before_it_fills_one() -> None:
    ours, cache = decoder_layer(), KeyValueCache()
    for given in ({"cache": [cache]}, {"cache": cache, "memory_cache": [KeyValueCache()]}):
        name = list(given)[-1]
        with pytest.raises(TypeError, match=rf"^{name} must be a cache of one attention module; got list\."):
            ours(QUERY, KEY, **given)
    assert cache.length == 0


def test_a_stack_refuses_caches_that_are_not_one_for_each_layer() -> None:
    ours = RelativeTransformerDecoder(decoder_layer(), 2)
    stack = RelativeTransformerEncoder(encoder_layer(), 2)
    for name in ("caches", "memory_caches"):
        is_memory = name == "memory_caches"
        for given, error, sentence in (
            (
                [KeyValueCache(is_memory=is_memory)],
                ValueError,
                f"{name} must have one cache for each layer = 2; got 1. Make them with make_caches().",
            ),
            (
                KeyValueCache(is_memory=is_memory),
                TypeError,
                f"{name} must be a list of caches; got KeyValueCache. Make it with make_caches().",
            ),
            (
                [KeyValueCache(is_memory=is_memory), None, 3][1:],
                TypeError,
                f"{name}[1] must be a cache of one attention module; got int. "
                "Make it with make_cache(), or give a stack its list as `caches`.",
            ),
        ):
            with refuses(error, sentence):
                ours(QUERY, KEY, **{name: given})
            if not is_memory:
                with refuses(error, sentence):
                    stack(QUERY, caches=given)


def test_a_stack_refuses_one_cache_for_two_layers_before_it_fills_one() -> None:
    stack = RelativeTransformerEncoder(encoder_layer(), 3)
    ours = RelativeTransformerDecoder(decoder_layer(), 3).eval()
    for name in ("caches", "memory_caches"):
        one, other = (KeyValueCache(is_memory=name == "memory_caches") for _ in range(2))
        told = f"{name}[2] must be a cache of its own; got that of {name}[0]. Make them with make_caches()."
        with refuses(ValueError, told):
            ours(QUERY, KEY, **{name: [one, other, one]})
        if name == "caches":
            with refuses(ValueError, told):
                stack(QUERY, caches=[one, other, one])
        assert one.length == other.length == 0
    # layers without a cache are no layers that share one
    torch.testing.assert_close(ours(QUERY, KEY, memory_caches=[None] * 3), ours(QUERY, KEY))


def test_a_decoder_layer_refuses_one_cache_for_both_attentions() -> None:
    cache = KeyValueCache()
    with refuses(
        ValueError,
        "memory_cache must be a cache of its own; got that of self-attention. "
        "Give KeyValueCache(is_memory=True).",
    ):
        decoder_layer()(QUERY, KEY, cache=cache, memory_cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_memory_of_another_length_than_its_cache_holds_is_refused(batch_first) -> None:
    query, key, shorter = (x if batch_first else x.transpose(0, 1) for x in (QUERY, KEY, KEY[:, 1:]))
    ours, cache = attention(batch_first=batch_first), KeyValueCache(is_memory=True)
    ours(query, key, key, cache=cache)
    told = "must have the length of what {} holds = 7; got 6. Begin with an empty cache for another memory."
    with refuses(ValueError, f"key {told.format('cache')}"):
        ours(query, shorter, shorter, cache=cache)
    layer = RelativeTransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=batch_first, max_distance=2)
    cache, memory_cache = KeyValueCache(), KeyValueCache(is_memory=True)
    layer(query, key, memory_cache=memory_cache)
    with refuses(ValueError, f"memory {told.format('memory_cache')}"):
        layer(query, shorter, cache=cache, memory_cache=memory_cache)
    assert cache.length == 0


def test_the_cache_of_another_batch_s_memory_is_refused() -> None:
    ours, cache = attention(), KeyValueCache(is_memory=True)
    ours(QUERY, KEY, KEY, cache=cache)
    with refuses(
        ValueError,
        "cache must hold the batch of query = 1; got 2. Reorder it, or begin with an empty one.",
    ):
        ours(QUERY[:1], KEY[:1], KEY[:1], cache=cache)


@pytest.mark.parametrize(
    ("made", "name", "kind"),
    [
        (RelativeTransformerEncoder, "encoder_layer", "RelativeTransformerEncoderLayer"),
        (RelativeTransformerDecoder, "decoder_layer", "RelativeTransformerDecoderLayer"),
    ],
)
def test_a_stack_refuses_parts_of_another_kind(made, name, kind) -> None:
    layer = encoder_layer() if name == "encoder_layer" else decoder_layer()
    for given, found in (
        (nn.Linear(2, 2), "a Linear"),
        (nn.TransformerEncoderLayer(WIDTH, HEADS), "a TransformerEncoderLayer"),
        (type(layer), kind),
    ):
        with refuses(TypeError, f"{name} must be a {kind}; got {found}. Make a {kind} with max_distance."):
            made(given, 2)
    with refuses(ValueError, "num_layers must be at least 1; got 0. Give a larger one."):
        made(layer, 0)
    with refuses(TypeError, "num_layers must be an integer; got float. Give a whole number."):
        made(layer, 2.0)
    with refuses(TypeError, "norm must be a module or None; got bool. Give nn.LayerNorm(...)."):
        made(layer, 2, True)


def test_a_transformer_refuses_source_and_target_that_do_not_belong_together() -> None:
    ours = RelativeTransformer(WIDTH, HEADS, 1, 1, 24, batch_first=True, max_distance=2)
    for given, error, sentence in (
        ((KEY, QUERY[:1]), ValueError, "tgt must have the batch of src = 2; got 1. It is batch_first=True"),
        ((KEY, QUERY[0]), ValueError, "tgt must have the dimensions of src = 3; got 2. Give batches"),
        ((KEY, None), TypeError, "tgt must be a tensor; got NoneType. Make it a tensor."),
        ((None, KEY), TypeError, "src must be a tensor; got NoneType. Make it a tensor."),
        ((KEY, QUERY[..., :3]), ValueError, "tgt must have the width d_model = 16; got 3. Check what comes"),
    ):
        with pytest.raises(error, match=rf"^{re.escape(sentence)}"):
            ours(*given)


def test_the_advice_about_a_mask_of_integers_is_right_for_both_conventions() -> None:
    ours = attention().eval()
    is_token = torch.arange(KEYS) < torch.tensor([KEYS, 3])[:, None]
    true = ours(QUERY, KEY, KEY, ~is_token)
    for mask, convert in ((is_token.long(), "mask == 0"), ((~is_token).long(), "mask != 0")):
        with pytest.raises(TypeError, match=re.escape(convert)):
            ours(QUERY, KEY, KEY, mask)
        torch.testing.assert_close(ours(QUERY, KEY, KEY, mask == 0 if "==" in convert else mask != 0), true)
