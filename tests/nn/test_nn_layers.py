"""The layers against torch's with the same weights, and the laws of their relative positions."""

import pytest
import torch
from torch import Tensor, nn

from relpos.nn import RelativeTransformerDecoderLayer, RelativeTransformerEncoderLayer

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, INNER, BATCH, TARGET, SOURCE = 16, 2, 24, 2, 5, 6
SIZES = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": INNER, "dtype": torch.float64}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(layer: nn.Module) -> nn.Module:
    """`layer` with weights that are all different, norms and biases too."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def padding(length: int) -> Tensor:
    hidden = torch.zeros(BATCH, length, dtype=torch.bool)
    hidden[1, length - 2 :] = True
    return hidden


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


OPTIONS = SIZES | {"dropout": 0.3, "layer_norm_eps": 1e-3, "batch_first": True}


# other options, and gradients: test_nn_loading.py


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_without_tables_equals_torch(norm_first) -> None:
    theirs = randomised(nn.TransformerEncoderLayer(**OPTIONS, norm_first=norm_first)).eval()
    ours = RelativeTransformerEncoderLayer(**OPTIONS, norm_first=norm_first, max_distance=None).eval()
    ours.load_state_dict(theirs.state_dict())
    src, hidden = draw(BATCH, SOURCE, WIDTH), padding(SOURCE)
    true = theirs(src, causal(SOURCE), hidden)
    # torch zeroes the outputs at padding
    for found in (ours(src, None, hidden, is_causal=True), ours(src, causal(SOURCE), hidden)):
        torch.testing.assert_close(found[~hidden], true[~hidden], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer_without_tables_equals_torch(norm_first) -> None:
    theirs = randomised(nn.TransformerDecoderLayer(**OPTIONS, norm_first=norm_first)).eval()
    ours = RelativeTransformerDecoderLayer(**OPTIONS, norm_first=norm_first, max_distance=None).eval()
    ours.load_state_dict(theirs.state_dict())
    tgt, memory = draw(BATCH, TARGET, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=2)
    masks = {"tgt_key_padding_mask": padding(TARGET), "memory_key_padding_mask": padding(SOURCE)}
    memory_mask = torch.zeros(TARGET, SOURCE, dtype=torch.bool)
    memory_mask[2, 1:3] = True
    true = theirs(tgt, memory, causal(TARGET), memory_mask, **masks)
    found = ours(tgt, memory, None, memory_mask, **masks, tgt_is_causal=True)
    torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("is_decoder", [True, False])
def test_relative_positions_are_in_self_attention_alone(is_decoder) -> None:
    kind = RelativeTransformerDecoderLayer if is_decoder else RelativeTransformerEncoderLayer
    tables = [name for name, _ in kind(**SIZES, max_distance=(3, 1)).named_parameters() if "relative" in name]
    assert tables == ["self_attn.relative_position_keys", "self_attn.relative_position_values"]


def test_without_positions_permuting_the_tokens_permutes_the_output_and_with_them_it_does_not() -> None:
    x, order = draw(1, SOURCE, WIDTH), torch.tensor([3, 0, 5, 1, 2, 4])
    for max_distance, is_equivariant in ((None, True), (2, False)):
        made = RelativeTransformerEncoderLayer(**SIZES, batch_first=True, max_distance=max_distance)
        layer = randomised(made).eval()
        assert torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-10) is is_equivariant


def test_moving_a_sentence_to_the_right_changes_nothing_but_its_place() -> None:
    layer = randomised(RelativeTransformerEncoderLayer(**SIZES, max_distance=2, batch_first=True)).eval()
    x = draw(1, SOURCE, WIDTH)
    moved = torch.cat((draw(1, 3, WIDTH, seed=8), x), 1)
    hidden = (torch.arange(SOURCE + 3) < 3)[None]
    found = layer(moved, src_key_padding_mask=hidden)[:, 3:]
    torch.testing.assert_close(found, layer(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", [RelativeTransformerEncoderLayer, RelativeTransformerDecoderLayer])
def test_an_unknown_activation_is_refused_with_the_known_ones(kind) -> None:
    with pytest.raises(
        ValueError,
        match=r"^activation must be one of \['gelu', 'relu', 'silu'\] or a function; got 'swish'\. "
        r"Give the function itself\.$",
    ):
        kind(**SIZES, max_distance=2, activation="swish")


@pytest.mark.parametrize("kind", [RelativeTransformerEncoderLayer, RelativeTransformerDecoderLayer])
def test_each_dropout_goes_to_its_place(kind) -> None:
    layer = kind(**SIZES, max_distance=2, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    assert (layer.dropout.p, layer.self_attn.dropout, layer.activation_dropout.p) == (0.1, 0.2, 0.3)
    layer = kind(**SIZES, max_distance=2, dropout=0.1, attention_dropout=0.0)
    assert (layer.dropout.p, layer.self_attn.dropout, layer.activation_dropout.p) == (0.1, 0.0, 0.1)
