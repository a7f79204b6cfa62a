"""The numbers of Triton's kernels where their blocks, parts, labels, widths and dtypes end.

The interpreter runs them on the CPU, which takes long: lengths are small, and so are blocks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from conformance.cases import TENSORS, Case, attend, case, detached, make, outcome
from relpos import relative_attention
from relpos.backends.triton import backend as triton

if triton.UNAVAILABLE is not None or not triton.IS_INTERPRETED:
    pytest.skip(f"triton: {triton.UNAVAILABLE or 'is not interpreted'}", allow_module_level=True)

from relpos.backends.triton import sizes

pytestmark = pytest.mark.interpreted

# queries and keys of a block, and keys, or queries, of one that reads labels
SIZES = ((16, 16, 16), (32, 16, 16), (16, 32, 16), (64, 32, 16), (32, 64, 32))


@contextmanager
def blocks(size: tuple[int, int, int], num_parts: int = 2) -> Iterator[None]:
    """Kernels in blocks of this size, and tables' gradients in so many parts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("interpreted", "rows"):
            patch.setattr(sizes, name, lambda _: sizes.Size(*size))
        patch.setattr(sizes, "num_parts", lambda *_: num_parts)
        yield


def assert_equals_the_reference(arguments: dict, tolerance: float = 1e-10) -> None:
    found = outcome(*attend("triton", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# queries, keys, start, left, right, is_causal, length: a band ends one key behind the end of a block, so that
# a part which is one key too large meets a pair of another label
PARTS = (
    (64, 64, 0, 2, 2, False, 64),
    (50, 64, 14, 0, 4, False, 63),
    (64, 40, -3, 15, 5, False, 33),
    (33, 61, 1, 3, 0, True, 61),
    (64, 64, 0, 2, 0, True, 49),
    (17, 63, 46, 16, 4, False, 48),
    (64, 64, 0, 0, 0, False, 17),
    (40, 64, 200, 4, 6, False, 64),
    (40, 64, -200, 4, 6, False, 47),
)


# each in the smallest blocks, whose ends are the most, and in one of the others
PARTS_AND_SIZES = [(x, size) for i, x in enumerate(PARTS) for size in (SIZES[0], SIZES[1 + i % 4])]


@pytest.mark.parametrize(("parts", "size"), PARTS_AND_SIZES, ids=str)
def test_each_pair_is_met_exactly_once_in_either_pass(parts: tuple, size: tuple[int, int, int]) -> None:
    """With unit vectors as queries, keys, values and gradients, each number that comes out is of one pair."""
    n, m, start, left, right, is_causal, length = parts
    torch.manual_seed(0)
    unit = torch.eye(64, dtype=torch.float64)
    rel_k, rel_v = torch.randn(2, left + right + 1, 64, dtype=torch.float64)
    leaves = [*(unit[None, None, :x].clone() for x in (n, m, m)), rel_k.clone(), rel_v.clone()]
    leaves = [x.requires_grad_() for x in leaves]
    given = {"max_distance": (left, right), "query_start": start, "is_causal": is_causal, "scale": 1.0}
    with blocks(size):
        out = relative_attention(*leaves, **given, key_lengths=torch.tensor([length]), backend="triton")
        grads = torch.autograd.grad(out, leaves, unit[None, None, :n])

    i, j = torch.arange(n)[:, None], torch.arange(m)
    labels = (j - start - i).clamp(-left, right) + left  # [query, key]
    is_visible = (j < length) & ((j <= start + i) if is_causal else torch.tensor(True))
    logits = (unit[:n, :m] + rel_k[labels, i]).masked_fill(~is_visible, -math.inf)
    weights = torch.softmax(logits, 1).nan_to_num(0.0)
    grad_weights = unit[:n, :m] + rel_v[labels, i]
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(1, keepdim=True))
    has_label = F.one_hot(labels, left + right + 1).double()  # [query, key, labels]
    weight_sums, logit_sums = (torch.einsum("nm,nml->ln", x, has_label) for x in (weights, grad_logits))
    truth = {
        "out": weights @ unit[:m] + weight_sums.T @ rel_v,
        "grad of query": grad_logits @ unit[:m] + logit_sums.T @ rel_k,
        "grad of key": grad_logits.T @ unit[:n],
        "grad of value": weights.T @ unit[:n],
        "grad of rel_k": logit_sums @ unit[:n],
        "grad of rel_v": weight_sums @ unit[:n],
    }
    for (name, x), found in zip(truth.items(), (out, *grads), strict=True):
        torch.testing.assert_close(
            found.view(x.shape), x, atol=1e-12, rtol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


sides = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 60])
lengths = st.sampled_from([1, 15, 16, 17, 31, 32, 33, 48, 50])
starts = st.one_of(st.integers(-80, 120), st.sampled_from([-(2**62), -(2**31) - 5, 2**31 + 5, 2**62]))


@st.composite
def cases_of_blocks(draw) -> tuple[Case, tuple[int, int, int], int]:
    """A case with any features of several blocks, the size of these, and parts of tables' gradients."""
    n, m, batch = draw(lengths), draw(lengths), draw(st.integers(1, 2))
    key_heads = 1 if batch == 2 else draw(st.integers(1, 2))
    relations = draw(st.sampled_from([None, None, None, None, "batch", "heads"]))
    start = draw(st.one_of(starts, st.tuples(*[starts] * batch)))
    key_lengths = draw(st.none() | st.tuples(*[st.sampled_from([0, 1, 16, 17, 31, 32, 50])] * batch))
    given = Case(
        "any",
        num_queries=n,
        num_keys=m,
        batch=batch,
        heads=key_heads * draw(st.sampled_from([1, 1, 2])),
        key_heads=key_heads,
        d_k=draw(st.sampled_from([3, 16, 17])),
        d_v=draw(st.sampled_from([3, 16, 17])),
        left=draw(sides),
        right=draw(sides),
        tables=draw(st.sampled_from(["both", "both", "keys", "values", "neither"])),
        is_per_head=draw(st.booleans()),
        query_start=start,
        relations=relations,
        mask=draw(st.sampled_from([None, None, None, "bool", "empty rows", "end", "float inf"])),
        key_lengths=None if key_lengths is None else tuple(min(x, m) for x in key_lengths),
        is_causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "transposed", "expanded", "strided"])),
    )
    return given, draw(st.sampled_from(SIZES)), draw(st.integers(1, 3))


# an example takes too long to look for a smaller one
@settings(max_examples=20, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(drawn=cases_of_blocks())
def test_cases_of_several_blocks_of_any_shape(drawn: tuple[Case, tuple[int, int, int], int]) -> None:
    given, size, num_parts = drawn
    with blocks(size, num_parts):
        assert_equals_the_reference(make(given))


LABELLED = (
    Case("labels for batch", num_queries=33, num_keys=40, relations="batch", left=0, right=18),
    Case("masked, keys", num_queries=17, num_keys=50, relations="heads", tables="keys", mask="bool"),
    Case("values", num_queries=20, relations="pairs", tables="values", d_v=7, key_lengths=(20, 17)),
    Case("grouped, per head", num_queries=17, relations="batch", heads=4, key_heads=2, is_per_head=True),
    Case("numbers added", num_queries=17, relations="heads", mask="float inf", key_lengths=(0, 16)),
)


@pytest.mark.parametrize("given", LABELLED, ids=str)
def test_labels_summed_in_any_order_equal_the_reference(given: Case) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with blocks((16, 16, 16)):
        assert_equals_the_reference(make(given))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", ["left over right", "relations for batch", "relations, values"])
def test_atomics_add_what_labels_share_unless_all_is_to_be_deterministic(
    name: str, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    if is_deterministic:
        request.getfixturevalue("nan_in_fresh_memory")
    added = []
    real = InterpreterBuilder.create_atomic_rmw
    monkeypatch.setattr(
        InterpreterBuilder, "create_atomic_rmw", lambda *given: added.append(given) or real(*given)
    )
    assert_equals_the_reference(make(case(name)))
    assert bool(added) == (name.startswith("relations") and not is_deterministic)


def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, with memory that holds NaN, where it can."""

    def filled(*given: Any, **options: Any) -> Tensor:
        memory = allocate(*given, **options)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    return filled


@pytest.mark.parametrize(
    "given",
    [
        case("left over right"),
        case("relations, values"),
        Case(
            "more labels than keys", num_queries=18, left=30, right=7, key_lengths=(18, 5), mask="float inf"
        ),
        Case("labels that no pair has", num_queries=18, relations="pairs", left=0, right=40),
    ],
    ids=str,
)
def test_no_number_depends_on_what_fresh_memory_held(given: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    for where, name in ((Tensor, "new_empty"), (torch, "empty_like")):
        monkeypatch.setattr(where, name, filling(getattr(where, name)))
    with blocks((16, 16, 16)):
        arguments = make(given)
        found = outcome(*attend("triton", arguments), arguments)
    monkeypatch.undo()
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("d_k", [1, 16, 33, 96, 256])
def test_heads_of_every_width(d_k: int) -> None:
    d_v = {1: 256, 16: 16, 33: 224, 96: 1, 256: 17}[d_k]
    sizes_of_case = {"num_queries": 20, "num_keys": 35, "query_start": 15, "left": 3, "right": 2}
    # float64 ends at 128
    dtype, tolerance = (torch.float64, 1e-10) if max(d_k, d_v) <= 128 else (torch.float32, 1e-4)
    given = Case("any", batch=1, heads=2, d_k=d_k, d_v=d_v, layout="strided", **sizes_of_case)
    with blocks((16, 16, 16)):
        assert_equals_the_reference(make(given, dtype), tolerance)


@pytest.mark.parametrize("labels", [{}, {"relations": "pairs"}], ids=["distances", "labels"])
def test_gradients_in_16_bits_stand_values_far_from_zero(labels: dict) -> None:
    sizes_of_case = {"batch": 1, "num_queries": 60, "left": 4, "right": 4, "d_k": 16, "d_v": 16}
    given = make(Case("any", **sizes_of_case, **labels), torch.bfloat16)
    with torch.no_grad():
        given["value"] += 10
    truth = detached(given, torch.float64)
    found, wanted = (outcome(*attend(name, x), x) for name, x in (("triton", given), ("reference", truth)))
    for name in ("grad of query", "grad of key", "grad of rel_k"):
        error = torch.linalg.vector_norm(found[name].double() - wanted[name])
        assert error < 0.02 * torch.linalg.vector_norm(wanted[name]), name


def test_a_table_of_float32_is_not_rounded_beside_bfloat16() -> None:
    query = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)
    table = torch.full((1, 16), 1 + 2**-10)
    call = {"scale": 1.0, "return_lse": True, "backend": "triton"}
    _, lse = relative_attention(query, 0 * query, query, table, None, **call)
    assert lse.item() == 16 * (1 + 2**-10)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e5])
@pytest.mark.parametrize("start", [0, 30])
def test_a_query_hidden_by_large_numbers_attends_evenly_forward_and_backward(
    hidden: float, start: int
) -> None:
    given = make(Case("any", batch=1, heads=1, num_queries=40, query_start=start), torch.float32)
    given["attn_mask"] = torch.zeros(40, 40)
    given["attn_mask"][3] = hidden
    row = torch.zeros(1, 1, 40, 4)
    row[:, :, 3] = 1
    results = []
    for backend in ("triton", "reference"):
        out, _ = attend(backend, given)
        results.append((out, *torch.autograd.grad(out, [given[name] for name in TENSORS], row)))
    # the gradient of each value is the weight that the query gives it
    grad_value = results[0][3]
    torch.testing.assert_close(grad_value.sum(), torch.tensor(4.0), atol=1e-4, rtol=0)
    if hidden <= -1e9:
        torch.testing.assert_close(grad_value, torch.full_like(grad_value, 1 / 40))
    for found, truth in zip(*results, strict=True):
        torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("mask", "held"), [(None, math.nan), ("bool", math.inf), ("float inf", math.nan)])
def test_what_does_not_exist_may_hold_anything_wherever_blocks_end(mask: str | None, held: float) -> None:
    ends = (16, 37)
    given = make(Case("any", num_queries=33, num_keys=50, query_start=10, mask=mask, key_lengths=ends))
    with blocks((16, 16, 16)):
        truth = outcome(*attend("triton", given), given)
        with torch.no_grad():
            for s, end in enumerate(ends):
                given["key"][s, :, end:] = held
                given["value"][s, :, end:] = held
        found = outcome(*attend("triton", given), given)
    assert all(torch.equal(found[name], x) for name, x in truth.items())


@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_a_query_without_a_key_has_no_gradients_whatever_comes_in(mask: str | None) -> None:
    given = make(Case("any", num_queries=40, query_start=-20, is_causal=True, batch=1, mask=mask))
    leaves = [given[name] for name in TENSORS]
    with blocks((16, 16, 16)):
        out, lse = attend("triton", given)
        grads = torch.randn_like(out), torch.randn_like(lse)
        truth = torch.autograd.grad((out, lse), leaves, grads, retain_graph=True)
        for x in grads:
            x[:, :, :20] = math.nan
        found = torch.autograd.grad((out, lse), leaves, grads)
    assert (out[:, :, :20] == 0).all()
    assert (lse[:, :, :20] == -math.inf).all()
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize("mask", [None, "float inf"])
def test_extreme_logits(mask: str | None) -> None:
    dtype = torch.float32
    given = detached(make(Case("any", num_queries=40, mask=mask, is_causal=True, batch=1)), dtype)
    given["scale"] = 1e6
    found, truth = (outcome(*attend(name, given), given) for name in ("triton", "reference"))
    # weights err by as much as the logits do
    rounding = torch.finfo(dtype).eps * 100
    torch.testing.assert_close(found["lse"], truth["lse"], atol=0, rtol=rounding)
    # nearly every query has one key that takes all
    is_same = torch.isclose(found["out"], truth["out"], atol=10 * rounding, rtol=0).all(-1)
    assert is_same.float().mean() > 0.9
    assert all(name == "lse" or x.isfinite().all() for name, x in found.items())
