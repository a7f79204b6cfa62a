"""How large tensors become, and how often a compiled backend compiles."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.cases import TENSORS, Case, attend, make
from relpos import relative_attention
from relpos.backends import BACKENDS

backends = pytest.mark.parametrize("backend", [x.name for x in BACKENDS])


class LargestOutput(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@backends
@pytest.mark.parametrize("is_per_head", [False, True])
def test_no_tensor_of_queries_by_keys_by_width_ever_exists(backend: str, is_per_head: bool) -> None:
    n = 512
    case = Case(
        "large",
        num_queries=n,
        batch=1,
        d_k=32,
        d_v=32,
        left=16,
        right=16,
        is_per_head=is_per_head,
        is_causal=True,
        key_lengths=(n - 7,),
    )
    arguments = make(case, torch.float32)
    with LargestOutput() as largest:
        out, lse = attend(backend, arguments)
        torch.autograd.grad(out.sum() + lse.sum(), [arguments[name] for name in TENSORS])
    assert largest.numel <= case.batch * case.heads * n * n


def attend_plainly(backend: str, arguments: dict) -> Tensor:
    """What is compiled: the call alone, without the question whether the backend fits."""
    return relative_attention(**arguments, backend=backend)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@backends
@pytest.mark.usefixtures("fresh_dynamo")
def test_ten_lengths_compile_at_most_twice(backend: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(attend_plainly, backend=counter, fullgraph=True)
    for n in range(3, 13):
        arguments = make(Case("any", num_queries=n, key_lengths=(n, n - 2), mask="bool"))
        torch.testing.assert_close(compiled(backend, arguments), attend_plainly(backend, arguments))
    assert counter.frame_count <= 2


@backends
@pytest.mark.usefixtures("fresh_dynamo")
def test_ten_steps_with_a_growing_cache_compile_at_most_twice(backend: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(attend_plainly, backend=counter, fullgraph=True)
    for m in range(4, 14):
        arguments = make(Case("any", num_queries=1, num_keys=m, query_start=m - 1, is_causal=True))
        torch.testing.assert_close(compiled(backend, arguments), attend_plainly(backend, arguments))
    assert counter.frame_count <= 2


@backends
@pytest.mark.usefixtures("fresh_dynamo")
def test_ten_starts_in_a_static_cache_compile_once(backend: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(attend_plainly, backend=counter, fullgraph=True)
    for i in range(10):
        lengths = (i + 1, i + 1)
        arguments = make(Case("any", num_queries=1, num_keys=16, query_start=(i, i), key_lengths=lengths))
        torch.testing.assert_close(compiled(backend, arguments), attend_plainly(backend, arguments))
    assert counter.frame_count == 1
