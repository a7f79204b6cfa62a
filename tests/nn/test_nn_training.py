"""Training stacks: gradients in every mode, padding, low precision, optimizers, checkpoints, compilation."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from relpos.nn import (
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, INNER, BATCH, TARGET, SOURCE, LAYERS = 16, 2, 24, 3, 5, 6, 2
MODES = {
    "none": {},
    "both": {"max_distance": 2},
    "keys": {"max_distance": 2, "relative_values": False},
    "values": {"max_distance": 2, "relative_keys": False},
    "left only": {"max_distance": (3, 0)},
    "per head": {"max_distance": 2, "relative_per_head": True},
    "k = 0": {"max_distance": 0},
    "beyond the length": {"max_distance": 30},
}
modes = pytest.mark.parametrize("mode", MODES)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transformer(**settings) -> RelativeTransformer:
    torch.manual_seed(0)
    options = {"dim_feedforward": INNER, "dropout": 0.0, "batch_first": True, "max_distance": None} | settings
    return RelativeTransformer(WIDTH, HEADS, LAYERS, LAYERS, **options)


def encoder(**settings) -> RelativeTransformerEncoder:
    made = transformer(**settings).encoder
    assert isinstance(made, RelativeTransformerEncoder)
    return made


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def assert_all_have_gradients(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), name


@modes
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_parameter_of_a_transformer_gets_a_gradient(mode, is_causal, norm_first) -> None:
    ours = transformer(norm_first=norm_first, **MODES[mode])
    out = ours(
        draw(BATCH, SOURCE, WIDTH),
        draw(BATCH, TARGET, WIDTH),
        src_is_causal=is_causal,
        tgt_is_causal=is_causal,
    )
    # the squares of what a norm gives sum to a constant
    (out * draw(WIDTH, seed=4)).sum().backward()
    assert_all_have_gradients(ours)
    for name, parameter in ours.named_parameters():
        # where all keys move alike no weight changes
        if "relative_position_values" in name or ("relative_position_keys" in name and mode != "k = 0"):
            assert parameter.grad.any(), name


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_of_padding_alone_is_finite_forward_and_backward_in_any_dtype(mode, dtype, kind) -> None:
    ours = transformer(dtype=dtype, **MODES[mode])
    source, target = (
        torch.zeros(BATCH, SOURCE, dtype=torch.bool),
        torch.zeros(BATCH, TARGET, dtype=torch.bool),
    )
    source[1], target[1], source[2, 3:] = True, True, True
    if kind == "float":
        source, target = (
            torch.zeros(x.shape, dtype=dtype).masked_fill(x, float("-inf")) for x in (source, target)
        )
    out = ours(
        draw(BATCH, SOURCE, WIDTH).to(dtype),
        draw(BATCH, TARGET, WIDTH).to(dtype),
        src_key_padding_mask=source,
        tgt_key_padding_mask=target,
        memory_key_padding_mask=source,
        tgt_is_causal=True,
    )
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().mean().backward()
    assert_all_have_gradients(ours)


@modes
def test_what_padding_holds_changes_no_token(mode) -> None:
    ours = transformer(dtype=torch.float64, **MODES[mode]).eval()
    src, tgt = draw(BATCH, SOURCE, WIDTH).double(), draw(BATCH, TARGET, WIDTH).double()
    hidden = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    hidden[1, 4:], hidden[2, :2] = True, True
    found, true = (
        ours(x, tgt, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        for x in (src.masked_fill(hidden[..., None], 1e6), src)
    )
    torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)


@modes
def test_tables_and_their_gradients_stay_float32_under_autocast(mode) -> None:
    ours = transformer(**MODES[mode])
    src, tgt = draw(BATCH, SOURCE, WIDTH), draw(BATCH, TARGET, WIDTH)
    true = ours(src, tgt, tgt_is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(src, tgt, tgt_is_causal=True)
    torch.testing.assert_close(out.float(), true, atol=0.1, rtol=0.1)
    out.float().square().sum().backward()
    assert_all_have_gradients(ours)
    assert (
        {x.dtype for x in ours.parameters()} == {x.grad.dtype for x in ours.parameters()} == {torch.float32}
    )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("mode", ["both", "per head", "left only", "k = 0"])
def test_optimizers_step_on_the_tables(kind, mode) -> None:
    ours = transformer(**MODES[mode])
    tables = {name: x for name, x in ours.named_parameters() if "relative_position_values" in name}
    before = {name: x.detach().clone() for name, x in tables.items()}
    optimizer = kind(ours.parameters(), lr=0.01)
    ours(draw(BATCH, SOURCE, WIDTH), draw(BATCH, TARGET, WIDTH), tgt_is_causal=True).square().sum().backward()
    optimizer.step()
    for name, x in tables.items():
        assert not x.grad.is_sparse
        assert not torch.equal(x, before[name]), name
        assert x.isfinite().all()


class Checkpointed(nn.Module):
    """A stack whose layers are computed again on the way back."""

    def __init__(self, stack: RelativeTransformerEncoder) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.stack.layers:
            x = checkpoint(layer, x, None, padding, use_reentrant=False)
        return x if self.stack.norm is None else self.stack.norm(x)


@modes
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_layers_give_the_same_outputs_and_gradients(mode, dropout) -> None:
    ours = encoder(dropout=dropout, dtype=torch.float64, **MODES[mode])
    x, padding = draw(BATCH, SOURCE, WIDTH).double(), torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    padding[1, 4:] = True
    outs, grads = [], []
    for run in (lambda: ours(x, None, padding), lambda: Checkpointed(ours)(x, padding)):
        ours.zero_grad()
        torch.manual_seed(3)
        outs.append(run())
        outs[-1].square().sum().backward()
        grads.append({name: y.grad for name, y in ours.named_parameters()})
    torch.testing.assert_close(outs[1], outs[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-12, rtol=1e-12)


def test_a_decoder_compiles_a_step_once_and_the_memory_once(counter) -> None:
    ours = transformer(dtype=torch.float64, max_distance=2).eval().decoder
    assert isinstance(ours, RelativeTransformerDecoder)
    tgt, memory = draw(BATCH, 8, WIDTH).double(), draw(BATCH, SOURCE, WIDTH).double()
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    with torch.no_grad():
        true = ours(tgt, memory, tgt_is_causal=True)
        caches, memory_caches = ours.make_caches(batch=BATCH, capacity=10)
        options = {"tgt_is_causal": True, "caches": caches, "memory_caches": memory_caches}
        found = [compiled(part, memory, **options) for part in tgt.split(1, 1)]
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)
    assert counter.frame_count == 2  # one fills the caches of the memory, one finds them filled


def test_dropout_acts_in_every_layer_while_training_only() -> None:
    ours, x = encoder(dropout=0.5, max_distance=2), draw(BATCH, SOURCE, WIDTH)
    torch.manual_seed(1)
    first, second = ours(x), ours(x)
    assert not torch.allclose(first, second)
    ours.eval()
    assert torch.equal(ours(x), ours(x))


def test_order_is_learned_from_relative_positions_alone() -> None:
    x, order = draw(1, SOURCE, WIDTH).double(), torch.tensor([3, 0, 5, 1, 2, 4])
    for relative, is_blind in (({}, True), ({"max_distance": 2}, False)):
        ours = encoder(dtype=torch.float64, **relative).eval()
        assert torch.allclose(ours(x[:, order]), ours(x)[:, order], atol=1e-10) is is_blind


def test_a_causal_stack_gives_the_future_no_gradient() -> None:
    layer = RelativeTransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True, max_distance=2)
    ours, x = RelativeTransformerEncoder(layer, 3), draw(1, SOURCE, WIDTH).requires_grad_()
    # the elements of what a norm gives sum to a constant
    out = ours(x, is_causal=True) * draw(WIDTH, seed=4)
    for t in range(SOURCE):
        (grad,) = torch.autograd.grad(out[:, t].sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()
        assert grad[:, t].any()
