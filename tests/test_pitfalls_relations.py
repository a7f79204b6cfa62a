"""Laws of attention under labels of pairs that some implementation has broken."""

import pytest
import torch

from conformance.skips import each_backend
from conformance.test_memory_and_compilation import Memory
from relpos import _dispatch, relation_attention
from relpos.backends.backend import Backend

# merged supports relative_attention only
takers_of_labels = pytest.mark.parametrize("backend", each_backend("merged"))


@takers_of_labels
@pytest.mark.parametrize("is_per_head", [False, True])
def test_labels_of_pairs_never_become_a_vector_for_each_pair(backend: str, is_per_head: bool) -> None:
    b, h, n, d, num_labels = 2, 2, 256, 32, 9
    tokens = [torch.randn(b, h, n, d, requires_grad=True) for _ in range(3)]
    shape = (h, num_labels, d) if is_per_head else (num_labels, d)
    tables = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    labels = torch.randint(-1, num_labels, (b, 1, n, n), dtype=torch.int8)
    with Memory() as memory:
        out, lse = relation_attention(*tokens, labels, *tables, return_lse=True, backend=backend)
        torch.autograd.grad(out.sum() + lse.sum(), [*tokens, *tables])
    assert memory.largest <= b * h * n * n


@pytest.mark.parametrize("wrong", [-2, 4, 127])
def test_a_label_out_of_range_is_found_before_any_kernel_reads_it(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    ran = []
    spy = Backend("spy", lambda inputs: [], lambda inputs: ran.append(inputs) or (inputs.query, None))
    monkeypatch.setattr(_dispatch, "BACKENDS", (spy,))
    x, table = torch.randn(1, 2, 3, 4), torch.randn(4, 4)
    labels = torch.zeros(3, 3, dtype=torch.int8)
    relation_attention(x, x, x, labels, table, None)
    assert len(ran) == 1
    labels[1, 2] = wrong
    for backend in (None, "spy", "reference"):
        with pytest.raises(
            ValueError, match=rf"^relations must be at least -1, .* at most 3, .*; got {wrong}\."
        ):
            relation_attention(x, x, x, labels, table, None, backend=backend)
    assert len(ran) == 1


@takers_of_labels
def test_rows_of_labels_that_no_pair_has_get_zero_gradients(backend: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    tables = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    labels = torch.tensor([[0, 3, -1], [3, 3, 0], [-1, 0, 3]])
    out = relation_attention(x, x, x, labels, *tables, backend=backend)
    for grad in torch.autograd.grad(out.square().sum(), tables):
        assert (grad[[1, 2, 4]] == 0).all()
        assert (grad[[0, 3]] != 0).any(-1).all()
