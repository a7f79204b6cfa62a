"""Traces and exported programs of attention, layers and stacks serve sizes that they were not made with.

tests/test_export.py holds encoders with embeddings, and ONNX.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_modules import HEADS, WIDTH, attention, layer
from torch import Tensor, nn
from torch.export import Dim

from relpos.nn import (
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)


class Call(nn.Module):
    """A module with the settings of its call."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call


class SelfCall(Call):
    def forward(self, x: Tensor, hidden: Tensor) -> Any:
        return self.call(self.module, x, hidden)


class CrossCall(Call):
    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Any:
        return self.call(self.module, x, memory, hidden)


def stack(kind: type) -> nn.Module:
    if kind is RelativeTransformer:
        return kind(WIDTH, HEADS, 1, 1, 24, batch_first=True, max_distance=(3, 1))
    is_encoder = kind is RelativeTransformerEncoder
    return kind(layer(RelativeTransformerEncoderLayer if is_encoder else RelativeTransformerDecoderLayer), 2)


SELF: dict[str, Callable[[], Call]] = {
    "attention": lambda: SelfCall(
        attention(max_distance=2), lambda f, x, hidden: f(x, x, x, hidden, need_weights=False)[0]
    ),
    "attention and its weights": lambda: SelfCall(
        attention(max_distance=(4, 1)), lambda f, x, hidden: f(x, x, x, hidden, is_causal=True)
    ),
    "encoder layer": lambda: SelfCall(
        layer(RelativeTransformerEncoderLayer), lambda f, x, hidden: f(x, None, hidden)
    ),
    "encoder": lambda: SelfCall(
        stack(RelativeTransformerEncoder), lambda f, x, hidden: f(x, None, hidden, is_causal=True)
    ),
    "encoder and its weights": lambda: SelfCall(
        stack(RelativeTransformerEncoder), lambda f, x, hidden: f(x, None, hidden, need_weights=True)
    ),
}
CROSS: dict[str, Callable[[], Call]] = {
    "cross-attention": lambda: CrossCall(
        attention(), lambda f, x, memory, hidden: f(x, memory, memory, hidden, need_weights=False)[0]
    ),
    "decoder layer": lambda: CrossCall(
        layer(RelativeTransformerDecoderLayer),
        lambda f, x, memory, hidden: f(
            x, memory, memory_key_padding_mask=hidden, tgt_is_causal=True, need_weights=True
        ),
    ),
    "decoder": lambda: CrossCall(
        stack(RelativeTransformerDecoder),
        lambda f, x, memory, hidden: f(x, memory, memory_key_padding_mask=hidden, tgt_is_causal=True),
    ),
    "transformer": lambda: CrossCall(
        stack(RelativeTransformer),
        lambda f, x, memory, hidden: f(
            memory, x, src_key_padding_mask=hidden, memory_key_padding_mask=hidden, tgt_is_causal=True
        ),
    ),
}
SIZES = ((1, 1, 1), (2, 9, 3), (3, 2, 8), (2, 70, 80))  # batch, length, memory


def made(name: str) -> Call:
    torch.manual_seed(0)
    return (SELF | CROSS)[name]().eval()


def inputs(name: str, batch: int, length: int, memory: int) -> tuple[Tensor, ...]:
    """Tokens, a memory where there is one, and True where that of the two that is attended to is padding."""
    keys = memory if name in CROSS else length
    lengths = torch.linspace(keys, 0 if batch > 2 else 1, batch).long()
    hidden = torch.arange(keys) >= lengths[:, None]
    x = torch.randn(batch, length, WIDTH)
    return (x, torch.randn(batch, memory, WIDTH), hidden) if name in CROSS else (x, hidden)


# torch warns of each size that is checked while it traces, and that its tracer is deprecated
traces = pytest.mark.filterwarnings(
    "ignore:Converting a tensor to a Python:torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning"
)


@traces
@pytest.mark.parametrize("name", [*SELF, *CROSS])
def test_a_trace_runs_at_sizes_it_was_not_traced_with(name) -> None:
    module = made(name)
    # check_trace runs it once more, at the same size
    traced = torch.jit.trace(module, inputs(name, 3, 7, 5))
    for size in SIZES:
        given = inputs(name, *size)
        torch.testing.assert_close(traced(*given), module(*given), atol=1e-5, rtol=1e-4)


@traces
def test_a_trace_keeps_nothing_of_the_mask_that_it_saw() -> None:
    module = made("encoder layer")
    x = torch.randn(2, 7, WIDTH)
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    for seen in (nothing, ~nothing):
        traced = torch.jit.trace(module, (x, seen))
        for hidden in (nothing, ~nothing, inputs("encoder layer", 2, 7, 0)[1]):
            torch.testing.assert_close(traced(x, hidden), module(x, hidden), atol=1e-5, rtol=1e-4)


@traces
def test_a_trace_gives_gradients_of_the_tables() -> None:
    module = made("attention")
    traced, given = torch.jit.trace(module, inputs("attention", 3, 7, 0)), inputs("attention", 2, 9, 0)
    grads = []
    for run in (module, traced):
        module.zero_grad()
        run(*given).square().sum().backward()
        grads.append([x.grad.clone() for x in module.parameters()])
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*SELF, *CROSS])
def test_an_exported_module_runs_at_sizes_it_was_not_exported_with(name) -> None:
    module = made(name)
    batch, length, memory = Dim("batch"), Dim("length"), Dim("memory")
    sizes: tuple[dict[int, Dim], ...] = ({0: batch, 1: length},) * 2
    if name in CROSS:
        sizes = ({0: batch, 1: length}, {0: batch, 1: memory}, {0: batch, 1: memory})
    program = torch.export.export(module, inputs(name, 3, 7, 5), dynamic_shapes=sizes)
    assert {
        node.target.namespace
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    } == {"aten"}
    run = program.module()
    for size in SIZES:
        given = inputs(name, *size)
        torch.testing.assert_close(run(*given), module(*given), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "module",
    [
        lambda: attention(max_distance=2),
        lambda: layer(RelativeTransformerEncoderLayer),
        lambda: stack(RelativeTransformerDecoder),
        lambda: nn.Sequential(nn.Linear(2, 2), attention()),
    ],
    ids=["attention", "layer", "stack", "a model of others"],
)
def test_torch_jit_script_is_refused_and_told_what_to_use(module) -> None:
    with pytest.raises(
        TypeError,
        match=r"^torch\.jit\.script cannot compile RelativeMultiheadAttention, since caches are objects of "
        r"Python\. Use torch\.export or torch\.compile, or torch\.jit\.trace\.$",
    ):
        torch.jit.script(module())
