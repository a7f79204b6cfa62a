"""How often torch.compile compiles an encoder, and that what it compiles gives the same.

tests/conformance/test_memory_and_compilation.py asks the same of each backend's function.
"""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from relpos import relation_attention
from relpos.nn import RelativeTransformerEncoder, RelativeTransformerEncoderLayer

SETTINGS = {
    "both tables": {"max_distance": 4},
    "per head, left over right": {"max_distance": (8, 2), "relative_per_head": True},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """An encoder of one layer without dropout, its compiled twin, and how often it was compiled."""

    def __init__(self, name: str, *, backend: str = "eager") -> None:
        torch.manual_seed(0)
        layer = RelativeTransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, **SETTINGS[name])
        self.plain: nn.Module = RelativeTransformerEncoder(layer, 1)
        self.counter = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(self.plain, backend=self.counter, fullgraph=True)

    def check(self, batch: int, length: int, *, is_causal: bool = False) -> None:
        """Compare outputs, and in training gradients of the input and of every parameter."""
        x = torch.randn(batch, length, 16, requires_grad=self.plain.training)
        padding = torch.arange(length) >= torch.linspace(length, 0, batch).long()[:, None]
        out, truth = (
            f(x, src_key_padding_mask=padding, is_causal=is_causal) for f in (self.compiled, self.plain)
        )
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-4)
        if self.plain.training:
            leaves = [x, *self.plain.parameters()]
            grad_out = torch.randn_like(out)
            found, wanted = (torch.autograd.grad(y, leaves, grad_out) for y in (out, truth))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "is_causal"), [*zip(SETTINGS, (False, True), strict=True)])
def test_ten_lengths_of_an_encoder_recompile_at_most_twice(name: str, is_causal: bool) -> None:
    encoder = Compiled(name, backend="aot_eager")
    # k = 4 and labels = 11 lie among them
    for length in (3, 4, 5, 1, 11, 8, 2, 40, 12, 9):
        encoder.check(3, length, is_causal=is_causal)
    assert encoder.counter.frame_count <= 3


def test_batches_and_lengths_that_change_together_recompile_once() -> None:
    encoder = Compiled("both tables")
    for batch, length in ((3, 5), (4, 9), (2, 30), (7, 2), (5, 5)):
        encoder.check(batch, length)
    assert encoder.counter.frame_count <= 2


def test_switching_between_training_and_evaluation_compiles_each_once() -> None:
    encoder = Compiled("both tables")
    for length in (5, 7):
        encoder.check(3, length)
    in_training = encoder.counter.frame_count
    encoder.plain.eval()
    encoder.check(3, 8)
    with_evaluation = encoder.counter.frame_count
    assert with_evaluation <= in_training + 1
    for is_training in (True, False, True):
        encoder.plain.train(is_training)
        for length in (5, 7, 20):
            encoder.check(3, length)
    assert encoder.counter.frame_count == with_evaluation


def test_ten_graphs_of_different_size_recompile_at_most_twice() -> None:
    torch.manual_seed(0)
    rel_k, rel_v = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(relation_attention, backend=counter, fullgraph=True)

    def outcome(attend, x: Tensor, relations: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        out = attend(x, x, x, relations, rel_k, rel_v, key_lengths=lengths)
        return out, *torch.autograd.grad(out.square().sum(), (x, rel_k, rel_v))

    for n in (3, 4, 5, 1, 11, 8, 2, 40, 12, 9):
        inputs = (
            torch.randn(2, 2, n, 4, requires_grad=True),
            torch.randint(-1, 6, (2, 1, n, n)),
            torch.tensor([n, n // 2]),
        )
        torch.testing.assert_close(
            outcome(compiled, *inputs), outcome(relation_attention, *inputs), atol=1e-4, rtol=1e-4
        )
    assert counter.frame_count <= 3


@pytest.mark.slow
# inductor imports what torch itself has deprecated
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
@pytest.mark.parametrize("name", SETTINGS)
def test_inductor_gives_the_same_outputs_and_gradients_at_ten_lengths(name: str) -> None:
    encoder = Compiled(name, backend="inductor")
    for length in (3, 4, 5, 6, 11, 8, 7, 40, 12, 9):
        encoder.check(3, length, is_causal=True)
    assert encoder.counter.frame_count <= 3
