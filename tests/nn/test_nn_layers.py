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
