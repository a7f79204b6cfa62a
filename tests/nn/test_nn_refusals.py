"""Modules refuse wrong arguments: one whole message of each kind; of the others, the name and the numbers."""

import re

import pytest
import torch
from small_modules import BATCH, HEADS, KEY, KEYS, QUERIES, QUERY, WIDTH, attention, draw, layer, refuses
from torch import Tensor, nn

from relpos.nn import (
    RelativeMultiheadAttention,
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

LAYERS = (RelativeTransformerEncoderLayer, RelativeTransformerDecoderLayer)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            (QUERY[0, 0], KEY, KEY),
            ValueError,
            "query must be [batch, length, embed_dim] or [length, embed_dim]; got [16]. "
            "batch_first=True sets the order of dimensions.",
        ),
        (
            (QUERY, KEY, KEY.double()),
            TypeError,
            "value must have the dtype of the weights = torch.float32; got torch.float64. "
            "Convert one of them with .to(), or use autocast.",
        ),
        (
            (QUERY, KEY, KEY, zeros(BATCH, KEYS).byte()),
            TypeError,
            "key_padding_mask must be bool (True = padding) or float (added to the logits); got torch.uint8. "
            "Give mask == 0 if 1 = keep, as in Hugging Face's masks, or mask != 0 if 1 = padding.",
        ),
    ],
)
def test_a_message_has_the_argument_the_rule_what_came_and_what_to_do(given, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        attention()(*given)


@pytest.mark.parametrize(
    "kind", [RelativeMultiheadAttention, *LAYERS, RelativeTransformer], ids=lambda kind: kind.__name__
)
def test_a_relative_module_without_max_distance_is_refused_and_told_what_to_give(kind) -> None:
    with refuses(TypeError, f"max_distance must be given to {kind.__name__}:", "max_distance=None"):
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
        ((nested,) * 3, TypeError, "query must be a dense tensor; got a nested one of layout torch.jagged."),
        ((QUERY, KEY[0], KEY), ValueError, "key must have as many dimensions as query = 3; got 2."),
        ((QUERY, KEY[:1], KEY[:1]), ValueError, "key must have the batch of query = 2; got 1."),
        ((QUERY, KEY, KEY[:, 1:]), ValueError, "value must have the length of key = 7; got 6."),
    ):
        with refuses(error, *parts):
            ours(*given)
    time_first = attention(batch_first=False)
    with refuses(ValueError, "key must have the batch of query = 5; got 7.", "batch_first=False"):
        time_first(QUERY, KEY, KEY)
    with refuses(ValueError, "query must be [length, batch, embed_dim] or", "got [16].", "batch_first=False"):
        time_first(*[draw(WIDTH)] * 3)


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_that_do_not_fit_are_refused_by_name_in_torchs_sense(batch_first) -> None:
    ours = attention(batch_first=batch_first)
    query, key = (x if batch_first else x.transpose(0, 1) for x in (QUERY, KEY))
    sizes = "attn_mask must be [query, key] = [5, 7] or [batch * heads, query, key] = [8, 5, 7]; got "
    padding = "key_padding_mask must be [batch, key] = [2, 7]; got "
    both = {"attn_mask": torch.zeros(QUERIES, KEYS), "key_padding_mask": torch.zeros(BATCH, KEYS).long()}
    for given, error, *parts in (
        ({"attn_mask": zeros(QUERIES, KEYS).long()}, TypeError, "attn_mask must be bool (True = hidden)"),
        (both, TypeError, "key_padding_mask must be bool (True = padding)", "got torch.int64."),
        ({"key_padding_mask": [[False] * KEYS]}, TypeError, "key_padding_mask must be a tensor", "got list."),
        ({"attn_mask": zeros(QUERIES, KEYS).to("meta")}, ValueError, "attn_mask must be on", "got meta."),
        ({"key_padding_mask": zeros(1, KEYS)}, ValueError, padding + "[1, 7].", "Check the sizes"),
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


def test_settings_of_attention_are_refused_by_name() -> None:
    for settings, error, *parts in (
        ({"add_bias_kv": True}, ValueError, "add_bias_kv must be False", "got True."),
        ({"add_zero_attn": True}, ValueError, "add_zero_attn must be False", "got True."),
        ({"backend": "fast"}, ValueError, "backend must be None or one of", "got 'fast'."),
        ({"vdim": 0}, ValueError, "vdim must be at least 1; got 0."),
        ({"kdim": "8"}, TypeError, "kdim must be an integer; got str."),
        ({"dropout": 1.5}, ValueError, "dropout must be between 0 and 1; got 1.5."),
        ({"dropout": "a"}, TypeError, "dropout must be a number; got str."),
    ):
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
            layer(kind, **settings)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_an_encoder_names_its_own_arguments(is_stack, norm_first) -> None:
    one = layer(RelativeTransformerEncoderLayer, norm_first=norm_first)
    ours = RelativeTransformerEncoder(one, 2) if is_stack else one
    mask, padding = "mask" if is_stack else "src_mask", "src_key_padding_mask"
    for name, given, error, part in (
        ("src", KEY[..., :4], ValueError, "have the width d_model = 16; got 4."),
        ("src", KEY[0, 0], ValueError, "be [batch, length, d_model] or [length, d_model]; got [16]"),
        (mask, KEY.long(), TypeError, "be bool (True = hidden) or float"),
        (mask, KEY, ValueError, "be [query, key] = [7, 7] or [batch * heads, query, key]"),
        (padding, KEY[0], ValueError, "be [batch, key] = [2, 7]; got [7, 16]."),
        ("is_causal", 1, TypeError, "be True or False; got int."),
    ):
        with refuses(error, f"{name} must {part}"):
            ours(**{"src": KEY} | {name: given})


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_a_decoder_names_its_own_arguments(is_stack, norm_first) -> None:
    one = layer(RelativeTransformerDecoderLayer, norm_first=norm_first)
    ours = RelativeTransformerDecoder(one, 2) if is_stack else one
    for name, given, error, part in (
        ("tgt", QUERY[..., :4], ValueError, "have the width d_model = 16; got 4."),
        ("memory", KEY.half(), TypeError, "have the dtype of the weights = torch.float32; got"),
        ("memory", KEY[:1], ValueError, "have the batch of tgt = 2; got 1."),
        ("memory", KEY[0], ValueError, "have as many dimensions as tgt = 3; got 2."),
        ("tgt_mask", QUERY, ValueError, "be [query, key] = [5, 5] or"),
        ("memory_mask", QUERY, ValueError, "be [query, key] = [5, 7] or"),
        ("tgt_key_padding_mask", zeros(BATCH, KEYS), ValueError, "be [batch, key] = [2, 5]; got [2, 7]."),
        ("memory_key_padding_mask", zeros(BATCH, QUERIES), ValueError, "be [batch, key] = [2, 7]; got"),
        ("tgt_is_causal", "yes", TypeError, "be True or False; got str."),
        ("memory_is_causal", None, TypeError, "be True or False; got NoneType."),
    ):
        with refuses(error, f"{name} must {part}"):
            ours(**{"tgt": QUERY, "memory": KEY} | {name: given})


@pytest.mark.parametrize("kind", LAYERS)
def test_a_stack_refuses_parts_of_another_kind(kind) -> None:
    is_encoder = kind is RelativeTransformerEncoderLayer
    made = RelativeTransformerEncoder if is_encoder else RelativeTransformerDecoder
    name = "encoder_layer" if is_encoder else "decoder_layer"
    for given, found in ((nn.Linear(2, 2), "a Linear"), (kind, kind.__name__)):
        with refuses(TypeError, f"{name} must be a {kind.__name__}; got {found}."):
            made(given, 2)
    with refuses(ValueError, "num_layers must be at least 1; got 0."):
        made(layer(kind), 0)
    with refuses(TypeError, "num_layers must be an integer; got float."):
        made(layer(kind), 2.0)
    with refuses(TypeError, "norm must be a module or None; got bool."):
        made(layer(kind), 2, True)


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
