"""How large tensors become, and how often a compiled backend compiles."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.cases import DEVICE, TENSORS, Case, attend, make
from conformance.skips import each_backend
from relpos import relative_attention

backends = pytest.mark.parametrize("backend", each_backend())


_ANY = torch._C.DispatchKey.CompositeExplicitAutograd
_KEY = torch._C.DispatchKey.CUDA if DEVICE.type == "cuda" else torch._C.DispatchKey.CPU


class Memory(TorchDispatchMode):
    """What operators return: the elements of the largest tensor, and the most bytes that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "relpos":
            # our own operators are seen into, not only what they return
            with self:
                key = _KEY if func.has_kernel_for_dispatch_key(_KEY) else _ANY
                out = func._op_dk(key, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                self._living[reference.cdata] = reference, storage.nbytes()
        self._living = {key: living for key, living in self._living.items() if not living[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._living.values()))
        return out


def forward_and_backward(backend: str, case: Case) -> Memory:
    arguments = make(case, torch.float32)
    with Memory() as memory:
        out, lse = attend(backend, arguments)
        torch.autograd.grad(out.sum() + lse.sum(), [arguments[name] for name in TENSORS])
    return memory


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
    assert forward_and_backward(backend, case).largest <= case.batch * case.heads * n * n


def test_memory_counts_what_lives_and_what_autograd_keeps_and_not_what_has_gone() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Memory() as memory:
        for _ in range(5):
            x.detach() + 1
    assert memory.peak == 2 * 4000  # x itself, and one sum at a time
    with Memory() as memory:
        (x + 1).exp().exp().exp()
    assert memory.peak == 3 * 4000  # the sum has gone, three powers are kept
    assert memory.largest == 1000


# bytes alive at once, over those of one float32 [query, key]. Of dense it is 7.1 in the backward pass:
# labels, which are int64 and count twice, logits, weights and the gradients between them. Of merged, which is
# linear in the length, it is 0.42. Of cpu it is 0.064: out and three gradients, each 1/64 of [query, key].
# What its kernel keeps for itself is seen in tests/backends/test_cpu_machine.py. Of triton it is 0.15:
# besides, 48 numbers a query and table, and parts of the tables' gradients.
PEAKS = {"triton": 0.16, "cpu": 0.066, "dense": 8, "merged": 0.5}


@backends
def test_peak_memory_at_4096_tokens_is_a_few_times_queries_by_keys(backend: str) -> None:
    n = 4096
    case = Case(
        "4096 tokens",
        num_queries=n,
        batch=1,
        heads=1,
        d_k=64,
        d_v=64,
        left=16,
        right=16,
        key_lengths=(n - 7,),
    )
    memory = forward_and_backward(backend, case)
    assert memory.largest <= n * n
    assert memory.peak < PEAKS[backend] * n * n * 4


def attend_plainly(backend: str | None, arguments: dict) -> Tensor:
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
        mask = None if backend == "merged" else "bool"
        arguments = make(Case("any", num_queries=n, key_lengths=(n, n - 2), mask=mask))
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


@pytest.mark.usefixtures("fresh_dynamo", "without_kernel")
def test_ten_lengths_on_both_sides_of_a_crossover_recompile_at_most_twice() -> None:
    counter = CompileCounter()
    compiled = torch.compile(attend_plainly, backend=counter, fullgraph=True)
    for n in (20, 100, 200, 255, 256, 300, 400, 500, 700, 900):
        arguments = make(Case("any", num_queries=n, heads=1, key_lengths=(n, n - 2)), torch.float32)
        torch.testing.assert_close(
            compiled(None, arguments), attend_plainly("dense", arguments), atol=1e-5, rtol=1e-4
        )
    assert counter.frame_count <= 3
