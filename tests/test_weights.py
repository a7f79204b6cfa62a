"""Attention that returns its weights, and labels of clipped distances by blocks of queries."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.cases import CASES, TENSORS, make
from relpos import relative_attention
from relpos._functional import attention_with_weights
from relpos._positions import label_table
from relpos.backends.pairs import BLOCK, Clipped, Labelled
from relpos.decompose import decompose

BY_DISTANCE = [case for case in CASES if case.relations is None and case.num_queries <= 63]
# queries, keys, start, left, right: one block, its neighbours, far away, wide tables, no far pairs at all
BANDS = [
    (BLOCK + 1, BLOCK + 1, 0, 3, 5),
    (3 * BLOCK - 1, 2 * BLOCK, 0, 0, 0),
    (2 * BLOCK, 4 * BLOCK + 3, 2 * BLOCK, 7, 0),
    (2 * BLOCK, 3, 0, 2, 2),
    (2 * BLOCK, 5, -300, 2, 2),
    (2 * BLOCK, 5, 300, 2, 2),
    (BLOCK + 7, BLOCK + 7, 0, 500, 400),
    (2 * BLOCK, 0, 0, 1, 1),
]


@pytest.mark.parametrize("case", BY_DISTANCE, ids=str)
def test_weights_and_their_gradients_are_those_of_the_formula(case) -> None:
    arguments = make(case)
    leaves = {
        name: arguments[name].clone().requires_grad_() for name in TENSORS if arguments[name] is not None
    }
    arguments |= leaves
    out, weights = attention_with_weights(**arguments)
    parts = decompose(**arguments)
    torch.testing.assert_close(weights, parts.weights, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(
        out, relative_attention(**arguments, backend="reference"), atol=1e-10, rtol=1e-10
    )
    grad_out, grad_weights = torch.randn_like(out), torch.randn_like(weights)
    found, true = (
        torch.autograd.grad((o, w), list(leaves.values()), (grad_out, grad_weights), allow_unused=True)
        for o, w in ((out, weights), (parts.content_out + parts.position_out, parts.weights))
    )
    torch.testing.assert_close(list(found), list(true), atol=1e-10, rtol=1e-10)


def test_weights_are_those_before_dropout_and_the_output_is_after_it() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 2, 70, 4, dtype=torch.float64) for _ in range(2))
    ones = torch.ones(1, 2, 70, 1, dtype=torch.float64)
    out, weights = attention_with_weights(query, key, ones, torch.randn(5, 4).double(), None, dropout_p=0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 70).double())
    assert (out - 1).abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_have_the_dtype_of_query_and_sum_to_one(dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(3))
    out, weights = attention_with_weights(query, key, value, torch.randn(5, 8), None)
    assert (out.dtype, weights.dtype) == (dtype, dtype)
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(1, 2, 70), atol=1e-2, rtol=0)


@pytest.mark.parametrize("band", BANDS)
def test_blocks_of_clipped_distances_equal_a_label_for_each_pair(band) -> None:
    num_queries, num_keys, start, left, right = band
    pairs = Clipped(num_keys, start, left, right)
    labels = label_table(num_queries, num_keys, start, left, right, torch.device("cpu"))
    true = Labelled(labels.expand(2, 3, -1, -1))
    generator = torch.Generator().manual_seed(0)

    def draw(columns: int) -> Tensor:
        x = torch.randn(6, num_queries, columns, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    by_label, by_pair = draw(left + right + 1), draw(num_keys)
    assert torch.equal(pairs.spread(by_label), true.spread(by_label))
    torch.testing.assert_close(
        pairs.collect(by_pair, left + right + 1), true.collect(by_pair, left + right + 1)
    )
    # each is the other's transpose, and so its gradient
    (grad,) = torch.autograd.grad(pairs.spread(by_label), by_label, by_pair.detach())
    torch.testing.assert_close(grad, true.collect(by_pair, left + right + 1))
    (grad,) = torch.autograd.grad(pairs.collect(by_pair, left + right + 1), by_pair, by_label.detach())
    torch.testing.assert_close(grad, true.spread(by_label))


def test_second_derivatives_pass_through_the_blocks() -> None:
    torch.manual_seed(0)
    shapes = ((1, 1, BLOCK + 6, 2),) * 3 + ((3, 2), (3, 2))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(lambda *x: attention_with_weights(*x), tensors, fast_mode=True)


def test_one_graph_with_weights_serves_lengths_of_one_block_and_of_many() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_with_weights, backend=counter, fullgraph=True)
    rel_k, rel_v = torch.randn(2, 5, 4)
    for length in (BLOCK - 1, BLOCK + 1, 3 * BLOCK):
        tensors = [torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3)]
        found, true = (
            (out, weights, *torch.autograd.grad(out.sum() + weights.square().sum(), tensors))
            for out, weights in (f(*tensors, rel_k, rel_v) for f in (compiled, attention_with_weights))
        )
        torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-4)
    assert counter.frame_count <= 2  # one with the first length, one with the length left free
    torch._dynamo.reset()
