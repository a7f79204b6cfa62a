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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_without_tables_equals_torch(
    training, is_causal, norm_first, activation, batch_first, bias
) -> None:
    options = SIZES | {
        "activation": activation,
        "norm_first": norm_first,
        "batch_first": batch_first,
        "bias": bias,
        "dropout": 0.0 if training else 0.3,
        "layer_norm_eps": 1e-3,
    }
    theirs = randomised(nn.TransformerEncoderLayer(**options)).train(training)
    ours = RelativeTransformerEncoderLayer(**options, max_distance=None).train(training)
    ours.load_state_dict(theirs.state_dict())
    src = draw(BATCH, SOURCE, WIDTH) if batch_first else draw(SOURCE, BATCH, WIDTH)
    hidden = padding(SOURCE)
    found = ours(src, src_key_padding_mask=hidden, is_causal=is_causal)
    true = theirs(src, causal(SOURCE) if is_causal else None, hidden)
    told = ours(src, causal(SOURCE) if is_causal else None, hidden)
    if batch_first:
        found, true, told = (x[~hidden] for x in (found, true, told))  # torch zeroes what is padding
    else:
        found, true, told = (x.transpose(0, 1)[~hidden] for x in (found, true, told))
    torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(told, true, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer_without_tables_equals_torch(norm_first, activation, batch_first, bias) -> None:
    options = SIZES | {
        "activation": activation,
        "norm_first": norm_first,
        "batch_first": batch_first,
        "bias": bias,
        "dropout": 0.3,
    }
    theirs = randomised(nn.TransformerDecoderLayer(**options)).eval()
    ours = RelativeTransformerDecoderLayer(**options, max_distance=None).eval()
    ours.load_state_dict(theirs.state_dict())
    tgt, memory = draw(BATCH, TARGET, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=2)
    if not batch_first:
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)
    masks = {"tgt_key_padding_mask": padding(TARGET), "memory_key_padding_mask": padding(SOURCE)}
    memory_mask = torch.zeros(TARGET, SOURCE, dtype=torch.bool)
    memory_mask[2, 1:3] = True
    true = theirs(tgt, memory, causal(TARGET), memory_mask, **masks)
    found = ours(tgt, memory, None, memory_mask, **masks, tgt_is_causal=True)
    torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)
    told = ours(tgt, memory, causal(TARGET), memory_mask, **masks)
    torch.testing.assert_close(told, true, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("is_decoder", [True, False])
def test_relative_positions_are_in_self_attention_alone(is_decoder) -> None:
    kind = RelativeTransformerDecoderLayer if is_decoder else RelativeTransformerEncoderLayer
    tables = [name for name, _ in kind(**SIZES, max_distance=(3, 1)).named_parameters() if "relative" in name]
    assert tables == ["self_attn.relative_position_keys", "self_attn.relative_position_values"]


@pytest.mark.parametrize("max_distance", [None, 2, 0, (2, 0)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_parameter_of_both_layers_gets_a_gradient(norm_first, max_distance) -> None:
    encoder = randomised(
        RelativeTransformerEncoderLayer(
            **SIZES, norm_first=norm_first, batch_first=True, max_distance=max_distance
        )
    )
    decoder = randomised(
        RelativeTransformerDecoderLayer(
            **SIZES, norm_first=norm_first, batch_first=True, max_distance=max_distance
        )
    )
    memory = encoder(draw(BATCH, SOURCE, WIDTH))
    decoder(draw(BATCH, TARGET, WIDTH), memory, tgt_is_causal=True).square().sum().backward()
    for layer in (encoder, decoder):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_causal_decoder_layer_gives_the_future_no_gradient() -> None:
    layer = randomised(RelativeTransformerDecoderLayer(**SIZES, max_distance=2, batch_first=True)).eval()
    tgt = draw(1, TARGET, WIDTH).requires_grad_()
    out = layer(tgt, draw(1, SOURCE, WIDTH), tgt_is_causal=True)
    for t in range(TARGET):
        (grad,) = torch.autograd.grad(out[:, t].sum(), tgt, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()


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


def test_layers_keep_no_buffer_and_run_beyond_any_length_seen() -> None:
    encoder = RelativeTransformerEncoderLayer(WIDTH, HEADS, INNER, max_distance=2, batch_first=True).eval()
    assert not list(encoder.buffers())
    for n in (1, 2, 400):
        assert encoder(draw(1, n, WIDTH).float()).isfinite().all()


def test_low_precision_autocast_runs_forward_and_backward() -> None:
    encoder = RelativeTransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, max_distance=2, batch_first=True)
    decoder = RelativeTransformerDecoderLayer(WIDTH, HEADS, INNER, 0.0, max_distance=2, batch_first=True)
    src, tgt = draw(BATCH, SOURCE, WIDTH).float(), draw(BATCH, TARGET, WIDTH).float()
    true = decoder(tgt, encoder(src), tgt_is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = decoder(tgt, encoder(src), tgt_is_causal=True)
    torch.testing.assert_close(out.float(), true, atol=0.1, rtol=0.1)
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for layer in (encoder, decoder) for x in layer.parameters())
