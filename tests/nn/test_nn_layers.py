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


@pytest.mark.parametrize(
    ("kind", "torchs"),
    [
        (RelativeTransformerEncoderLayer, nn.TransformerEncoderLayer),
        (RelativeTransformerDecoderLayer, nn.TransformerDecoderLayer),
    ],
)
def test_each_dropout_has_its_place_and_torchs_name(kind, torchs) -> None:
    theirs = {name for name, x in torchs(WIDTH, HEADS).named_modules() if isinstance(x, nn.Dropout)}
    for given, inner, weights in (
        ({"attention_dropout": 0.2, "activation_dropout": 0.3}, 0.3, 0.2),
        ({"attention_dropout": 0.0}, 0.1, 0.0),
    ):
        layer = kind(**SIZES, max_distance=2, dropout=0.1, **given)
        found = {name: x.p for name, x in layer.named_modules() if isinstance(x, nn.Dropout)}
        assert found == dict.fromkeys(theirs, 0.1) | {"dropout": inner}
        assert layer.self_attn.dropout == weights


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2", "dropout3"])
@pytest.mark.parametrize(
    ("kind", "torchs"),
    [
        (RelativeTransformerEncoderLayer, nn.TransformerEncoderLayer),
        (RelativeTransformerDecoderLayer, nn.TransformerDecoderLayer),
    ],
)
def test_a_dropout_replaced_by_its_name_acts_where_torchs_does(kind, torchs, name, norm_first) -> None:
    ours = kind(**SIZES, dropout=0.0, max_distance=None, batch_first=True, norm_first=norm_first)
    theirs = torchs(**SIZES, dropout=0.0, batch_first=True, norm_first=norm_first)
    theirs.load_state_dict(randomised(ours).state_dict())
    if not hasattr(theirs, name):
        assert not hasattr(ours, name)
        return
    given = [draw(BATCH, TARGET, WIDTH)]
    if torchs is nn.TransformerDecoderLayer:
        given.append(draw(BATCH, SOURCE, WIDTH, seed=2))
    before = ours(*given)
    for layer in (ours, theirs):
        setattr(layer, name, nn.Tanh())
    torch.testing.assert_close(ours(*given), theirs(*given), atol=1e-10, rtol=1e-10)
    assert not torch.allclose(ours(*given), before)
