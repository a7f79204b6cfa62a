"""Nested tensors are refused by the name of the argument, and change nothing where they can be taken.

`torch.nn.TransformerEncoder` with our attention is tested in test_nn_self_attention.py.
"""

from typing import Any

import pytest
import torch
from small_modules import BATCH, HEADS, KEY, KEYS, WIDTH, attention, draw, layer, refuses
from torch import Tensor

from relpos.nn import (
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

pytestmark = [
    pytest.mark.usefixtures("nan_in_fresh_memory"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
PAD, DENSE = "Pad it, and give a padding mask.", "Convert it with .to_dense(), or pad it if it is nested."


def nested(*parts: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor(list(parts), layout=layout)


def ragged(layout: torch.layout) -> Tensor:
    return nested(draw(KEYS, WIDTH), draw(4, WIDTH), layout=layout)


def refuses_nested(name: str, layout: torch.layout, advice: str = PAD) -> Any:
    return refuses(TypeError, f"{name} must be a dense tensor; got a nested one of layout {layout}. {advice}")


def test_attention_refuses_jagged_tensors_and_mixtures_by_name() -> None:
    ours, jagged, strided = attention(), ragged(torch.jagged), ragged(torch.strided)
    for given, name, layout in (
        ((jagged, jagged, jagged), "query", torch.jagged),
        ((KEY, jagged, jagged), "key", torch.jagged),
        ((KEY, KEY, jagged), "value", torch.jagged),
        ((strided, KEY, KEY), "query", torch.strided),
        ((KEY, strided, strided), "key", torch.strided),
        ((strided, jagged, jagged), "query", torch.strided),
    ):
        with refuses_nested(name, layout):
            ours(*given)


def test_attention_refuses_nested_tensors_beside_masks_and_caches_and_of_other_lengths() -> None:
    ours, x = attention(), ragged(torch.strided)
    other = nested(draw(3, WIDTH), draw(2, WIDTH))
    for given, settings in (
        ((x, x, x), {"attn_mask": torch.zeros(KEYS, KEYS)}),
        ((x, x, x), {"key_padding_mask": torch.zeros(BATCH, KEYS)}),
        ((x, x, x), {"cache": ours.make_cache()}),
        ((x, other, other), {}),
    ):
        with refuses_nested("query", torch.strided):
            ours(*given, **settings)
    with refuses_nested("query", torch.strided):
        attention(batch_first=False)(x, x, x)


@pytest.mark.parametrize(
    "parts",
    [(), (draw(WIDTH), draw(WIDTH)), (draw(2, 3, WIDTH),) * 2, (draw(3, WIDTH), draw(3, WIDTH - 4))],
    ids=["empty", "vectors", "4-D", "two widths"],
)
def test_attention_refuses_a_nested_tensor_of_anything_but_sequences_of_one_width(parts) -> None:
    x = nested(*parts)
    with refuses_nested("query", torch.strided):
        attention()(x, x, x)


@layouts
@pytest.mark.parametrize("is_stack", [False, True])
def test_layers_and_stacks_refuse_nested_tensors_by_their_own_names(layout, is_stack) -> None:
    encoder, decoder = layer(RelativeTransformerEncoderLayer), layer(RelativeTransformerDecoderLayer)
    if is_stack:
        encoder, decoder = RelativeTransformerEncoder(encoder, 2), RelativeTransformerDecoder(decoder, 2)
    x = ragged(layout)
    with refuses_nested("src", layout):
        encoder(x)
    with refuses_nested("tgt", layout):
        decoder(x, KEY)
    with refuses_nested("memory", layout):
        decoder(KEY, x)


@layouts
def test_a_transformer_refuses_nested_tensors_by_name(layout) -> None:
    ours, x = RelativeTransformer(WIDTH, HEADS, 1, 1, 24, batch_first=True, max_distance=2), ragged(layout)
    with refuses_nested("src", layout):
        ours(x, KEY)
    with refuses_nested("tgt", layout):
        ours(KEY, x)


@layouts
def test_nested_masks_are_refused_by_name(layout) -> None:
    mask = nested(torch.zeros(KEYS), torch.zeros(4), layout=layout)
    ours, encoder = attention(), layer(RelativeTransformerEncoderLayer)
    decoder = layer(RelativeTransformerDecoderLayer)
    for module, given, names in (
        (ours, (KEY,) * 3, ("attn_mask", "key_padding_mask")),
        (encoder, (KEY,), ("src_mask", "src_key_padding_mask")),
        (RelativeTransformerEncoder(encoder, 2), (KEY,), ("mask", "src_key_padding_mask")),
        (decoder, (KEY, KEY), ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")),
    ):
        for name in names:
            with refuses_nested(name, layout, DENSE):
                module(*given, **{name: mask})


def test_sparse_masks_are_refused_by_name() -> None:
    with refuses(TypeError, f"attn_mask must be a dense tensor; got torch.sparse_coo. {DENSE}"):
        attention()(KEY, KEY, KEY, attn_mask=torch.ones(KEYS, KEYS).to_sparse())


@pytest.mark.parametrize("max_distance", [None, 2])
def test_each_sequence_of_a_nested_tensor_attends_as_it_does_alone(max_distance) -> None:
    ours = attention(max_distance=max_distance).eval()
    parts = draw(KEYS, WIDTH), draw(4, WIDTH)
    x = nested(*parts)
    out, weights = ours(x, x, x)
    assert out.is_nested
    assert weights.shape == (BATCH, KEYS, KEYS)
    for part, found in zip(parts, out.unbind(), strict=True):
        torch.testing.assert_close(found, ours(part, part, part)[0], atol=1e-6, rtol=1e-5)
