"""The kernel's numbers where its blocks, splits and dtypes end."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.cases import Case, attend, detached, make, outcome
from relpos import relative_attention
from relpos.backends.cpu import backend as cpu

pytestmark = [
    pytest.mark.usefixtures("nan_in_fresh_memory"),
    pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}"),
]

# queries go in blocks of 64, keys in blocks of 256
QUERIES = (1, 2, 63, 64, 65, 127, 128, 129)
KEYS = (1, 2, 63, 64, 65, 255, 256, 257)
sides = st.sampled_from([0, 1, 2, 17, 62, 63, 64, 65, 127, 128, 129, 300])
widths = st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40])


def assert_equals_the_reference(arguments: dict, tolerance: float = 1e-10) -> None:
    found = outcome(*attend("cpu", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("n", QUERIES)
@pytest.mark.parametrize("m", KEYS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_at_the_edges_of_blocks(n: int, m: int, is_causal: bool) -> None:
    # the last query stands at the last key, as in a cache
    sizes = {"num_queries": n, "num_keys": m, "batch": 1, "heads": 1, "query_start": m - n}
    for left, right in ((3, 5), (64, 1), (0, 63)):
        assert_equals_the_reference(make(Case("any", **sizes, left=left, right=right, is_causal=is_causal)))


@st.composite
def long_cases(draw) -> Case:
    """Cases of several blocks and widths in any combination."""
    n, m = draw(st.integers(1, 150)), draw(st.integers(1, 300))
    key_heads = draw(st.integers(1, 2))
    relations = draw(st.sampled_from([None, None, None, "pairs", "batch", "heads"]))
    return Case(
        "any",
        num_queries=n,
        num_keys=m,
        batch=draw(st.integers(1, 2)),
        heads=key_heads * draw(st.integers(1, 2)),
        key_heads=key_heads,
        d_k=draw(widths),
        d_v=draw(widths),
        left=draw(st.integers(0, 60) if relations else sides),
        right=draw(st.integers(0, 60) if relations else sides),
        tables=draw(st.sampled_from(["both", "both", "keys", "values", "neither"])),
        is_per_head=draw(st.booleans()),
        query_start=draw(st.integers(-200, 400)),
        relations=relations,
        mask=draw(st.sampled_from([None, None, "bool", "empty rows", "keys", "end", "float inf", "heads"])),
        is_causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "transposed", "expanded", "strided"])),
    )


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(case=long_cases(), lengths=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_long_cases_of_any_shape(case: Case, lengths: tuple[float, float] | None) -> None:
    arguments = make(case)
    if lengths is not None:
        m = arguments["key"].shape[2]
        arguments["key_lengths"] = torch.tensor([round(share * m) for share in lengths[: case.batch]])
    assert_equals_the_reference(arguments)


SPLITS = (
    Case("just one", num_queries=3, num_keys=2048, query_start=1000),
    Case("one key more", num_queries=3, num_keys=2049, query_start=2046, is_causal=True),
    Case("a block of queries", num_queries=64, num_keys=2300, query_start=2100, left=70, right=90),
    Case("one query more than a block", num_queries=65, num_keys=2300, query_start=2100),
    Case("three", num_queries=1, num_keys=4097, query_start=4096, is_causal=True, d_v=9),
    Case("the band lies across a cut", num_queries=9, num_keys=4097, query_start=2040, left=16, right=16),
    Case(
        "lengths end at a cut and within",
        num_queries=2,
        num_keys=4100,
        query_start=7,
        key_lengths=(2048, 2050),
    ),
    Case("a sequence without keys", num_queries=2, num_keys=4100, query_start=0, key_lengths=(0, 4100)),
    Case("causal hides whole splits", num_queries=5, num_keys=4100, query_start=10, is_causal=True),
    Case("causal hides all from some queries", num_queries=5, num_keys=4100, query_start=-3, is_causal=True),
    Case("labels", num_queries=3, num_keys=2100, relations="batch", mask="empty rows"),
    Case("grouped", num_queries=4, num_keys=2100, query_start=2096, heads=4, key_heads=2, is_per_head=True),
)


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_splits_of_the_keys_merge_to_the_whole(case: Case) -> None:
    assert_equals_the_reference(make(case))


@pytest.mark.parametrize("hidden", [(0, 2048), (2048, 4096), (4096, 4200), (0, 4200), (5, 4199)])
@pytest.mark.parametrize("kind", ["bool", "float", "bool for each query"])
def test_splits_that_a_mask_hides_wholly_add_nothing(hidden: tuple[int, int], kind: str) -> None:
    arguments = make(Case("any", num_queries=3, num_keys=4200, query_start=2000, batch=1))
    allowed = torch.ones(4200, dtype=torch.bool)
    allowed[slice(*hidden)] = False
    mask = {
        "bool": allowed,
        "float": torch.zeros(4200).masked_fill(~allowed, -math.inf),
        "bool for each query": allowed.repeat(3, 1),
    }[kind]
    assert_equals_the_reference(arguments | {"attn_mask": mask})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_masks_of_every_shape_and_dtype(dtype: torch.dtype, is_transposed: bool) -> None:
    b, h, n, m = 2, 3, 70, 130
    arguments = make(Case("any", batch=b, heads=h, num_queries=n, num_keys=m, query_start=30))
    torch.manual_seed(0)
    for i in range(16):
        shape = [size if i >> d & 1 else 1 for d, size in enumerate((b, h, n, m))]
        mask = torch.randn(shape)
        mask = mask > 0 if dtype == torch.bool else mask.masked_fill(mask > 1, -math.inf).to(dtype)
        if is_transposed:
            mask = mask.mT.contiguous().mT.expand(b, h, n, m)
        assert_equals_the_reference(arguments | {"attn_mask": mask})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_labels_of_every_dtype_and_shape(dtype: torch.dtype) -> None:
    b, h, n, m = 2, 2, 66, 130
    given = make(Case("any", batch=b, heads=h, num_queries=n, num_keys=m, relations="none", left=0, right=99))
    torch.manual_seed(0)
    for i in range(16):
        shape = [size if i >> d & 1 else 1 for d, size in enumerate((b, h, n, m))]
        labels = torch.randint(-1 if dtype.is_signed else 0, 100, shape).to(dtype)
        assert_equals_the_reference(given | {"relations": labels})
        assert_equals_the_reference(given | {"relations": labels.mT.contiguous().mT.expand(b, h, n, m)})


def test_more_labels_than_a_byte_counts_and_labels_that_no_pair_has() -> None:
    arguments = make(
        Case("any", num_queries=70, num_keys=9, relations="batch", left=0, right=40_000, d_k=2, d_v=2)
    )
    arguments["relations"] = arguments["relations"].clamp(max=35_000)
    assert_equals_the_reference(arguments)


@pytest.mark.parametrize("start", [-(2**62), 2**62, -(2**31) - 5, 2**31 + 5, 2**32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("k", [0, 70])
def test_the_farthest_starts(start: int, is_causal: bool, k: int) -> None:
    case = Case("any", num_queries=66, num_keys=130, query_start=start, is_causal=is_causal, left=k, right=k)
    for query_start in (start, torch.tensor([start, 3]), torch.tensor([-3, start])):
        assert_equals_the_reference(make(case) | {"query_start": query_start})


@pytest.mark.parametrize("far", [0, 1000])
@pytest.mark.parametrize("n", [1, 70])
def test_rows_of_tables_that_no_pair_reaches_get_zeros(n: int, far: int) -> None:
    arguments = make(Case("any", num_queries=n, num_keys=80, query_start=5, left=90 + far, right=85 + far))
    assert_equals_the_reference(arguments)
    grads = torch.autograd.grad(
        attend("cpu", arguments)[0].square().sum(), [arguments["rel_k"], arguments["rel_v"]]
    )
    for grad in grads:
        # distances from -(n + 4) to 74
        assert (grad[: 90 + far - n - 4] == 0).all()
        assert (grad[90 + far + 75 :] == 0).all()
        assert (grad[90 + far - n - 4 : 90 + far + 75] != 0).any(-1).all()


@pytest.mark.parametrize("size", [1e4, 1e6, 1e15, 1e30])
@pytest.mark.parametrize("mask", [None, "float inf", "empty rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_logits(size: float, mask: str | None, dtype: torch.dtype) -> None:
    arguments = detached(make(Case("any", num_queries=70, mask=mask, is_causal=True)), dtype)
    with torch.no_grad():
        arguments["query"].mul_(size)
    found = outcome(*attend("cpu", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    # weights err by as much as the logits do
    rounding = torch.finfo(dtype).eps * 100
    torch.testing.assert_close(found["lse"], truth["lse"], atol=0, rtol=rounding)
    if size <= 1e6:
        torch.testing.assert_close(found["out"], truth["out"], atol=rounding * size, rtol=0)
    else:
        # nearly every query has one key that takes all
        is_same = torch.isclose(found["out"], truth["out"], atol=10 * rounding, rtol=0).all(-1)
        assert is_same.float().mean() > 0.99
    for name, x in found.items():
        assert not x.isnan().any()
        assert name == "lse" or x.isfinite().all()


@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("d", [4, 16])
def test_what_does_not_exist_may_hold_anything(n: int, d: int, held: float) -> None:
    sizes = {"num_queries": n, "num_keys": 2200, "d_k": d, "d_v": d, "query_start": 100}
    given = make(Case("any", **sizes, heads=1, key_lengths=(130, 2100)), torch.float32)
    truth = outcome(*attend("cpu", given), given)
    with torch.no_grad():
        for name in ("key", "value"):
            for s, length in enumerate((130, 2100)):
                given[name][s, :, length:] = held
    found = outcome(*attend("cpu", given), given)
    assert all(torch.equal(found[name], x) for name, x in truth.items())


@pytest.mark.parametrize("place", [0, 2047, 2048, 4200])
@pytest.mark.parametrize("n", [1, 70])
def test_what_is_not_a_number_comes_out_wherever_it_stands(place: int, n: int) -> None:
    given = make(Case("any", num_queries=n, num_keys=4300, batch=1, heads=1, query_start=9), torch.float32)
    with torch.no_grad():
        given["key"][0, 0, place] = math.nan
    out, lse = attend("cpu", given)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_query_without_a_key_has_no_gradients_whatever_comes_in() -> None:
    given = make(Case("any", num_queries=5, num_keys=5, query_start=-2, is_causal=True, batch=1))
    tensors = [x for x in (given[name] for name in ("query", "key", "value", "rel_k", "rel_v"))]
    out, lse = attend("cpu", given)
    grads = torch.randn_like(out), torch.randn_like(lse)
    truth = torch.autograd.grad((out, lse), tensors, grads, retain_graph=True)
    for x in grads:
        x[:, :, :2] = math.nan
    found = torch.autograd.grad((out, lse), tensors, grads)
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
def test_subnormal_float16_is_kept_where_subnormal_float32_is_not() -> None:
    value = torch.full((1, 1, 1, 8), 6e-7, dtype=torch.float16)
    out = relative_attention(value, value, value, None, None, backend="cpu")
    assert torch.equal(out.view(torch.int16), value.view(torch.int16))


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a dtype of 16 bits."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_half_precision_goes_through_unchanged(dtype: torch.dtype) -> None:
    # one key: out is its value, and the gradient of the value is that of out
    value = every_number(dtype)[None, None, None].requires_grad_()
    token = torch.zeros(1, 1, 1, 1, dtype=dtype)
    out = relative_attention(token, token, value, None, None, backend="cpu")
    (grad,) = torch.autograd.grad(out, value, value.detach().clone())
    is_nan = value.isnan()
    for x in (out, grad):
        assert torch.equal(x.isnan(), is_nan)
        assert torch.equal(x[~is_nan], value[~is_nan])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once_and_as_torch_rounds(dtype: torch.dtype) -> None:
    # out is a value and a row of float32, whose sum lies between numbers of half precision, or beyond them
    value = every_number(dtype)
    value = value[value.isfinite()]
    row = value.float() * torch.linspace(-0.7, 0.7, len(value)).roll(777) + 1e-9
    table = row[None]
    token = torch.zeros(1, 1, 1, 1, dtype=dtype)
    out = relative_attention(token, token, value[None, None, None], None, table, backend="cpu")
    truth = (value.float() + row).to(dtype)
    assert truth.isinf().any() or dtype == torch.bfloat16
    assert torch.equal(out.flatten(), truth)


def test_float32_is_exact_where_its_sums_are() -> None:
    # weights of powers of two and values of whole numbers: nothing is rounded
    n = 256
    x, value = torch.zeros(1, 1, n, 3), torch.arange(n, dtype=torch.float32).expand(1, 1, 5, n).mT
    out, lse = relative_attention(x, x, value, None, None, return_lse=True, backend="cpu")
    assert torch.equal(out, torch.full_like(out, (n - 1) / 2))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)), atol=0, rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0])
def test_gradients_in_16_bits_stand_values_far_from_zero(mean: float, dtype: torch.dtype) -> None:
    sizes = {"num_queries": 70, "num_keys": 70, "left": 4, "right": 4, "d_k": 16, "d_v": 16}
    given = make(Case("any", batch=1, heads=2, **sizes), dtype)
    with torch.no_grad():
        given["value"] += mean
    truth = detached(given, torch.float64)
    found, wanted = (outcome(*attend(name, x), x) for name, x in (("cpu", given), ("reference", truth)))
    for name in ("grad of query", "grad of key", "grad of rel_k"):
        error = torch.linalg.vector_norm(found[name].double() - wanted[name])
        assert error < 0.02 * torch.linalg.vector_norm(wanted[name])


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -1e5])
def test_a_query_hidden_by_large_numbers_attends_evenly_forward_and_backward(hidden: float) -> None:
    query, key, value = (torch.randn(1, 1, 64, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(3, 8, requires_grad=True)
    mask = torch.zeros(1, 1, 64, 64)
    mask[:, :, 3] = hidden
    row = torch.zeros(1, 1, 64, 8)
    row[:, :, 3] = 1
    grads = [
        torch.autograd.grad(
            relative_attention(query, key, value, table, table, attn_mask=mask, backend=backend), value, row
        )[0]
        for backend in ("cpu", "reference", "dense")
    ]
    for grad in grads:
        torch.testing.assert_close(grad.sum(), torch.tensor(8.0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("by", ["causal", "bool", "float"])
def test_what_a_later_key_holds_does_not_reach_earlier_queries(held: float, by: str) -> None:
    query, key, value = (torch.randn(1, 1, 80, 8) for _ in range(3))
    table = torch.randn(7, 8)
    order = torch.ones(80, 80, dtype=torch.bool).tril()
    masks = {"bool": order, "float": torch.zeros(80, 80).masked_fill(~order, -math.inf)}
    given = {"is_causal": True} if by == "causal" else {"attn_mask": masks[by]}
    truth = relative_attention(query, key, value, table, table, backend="cpu", **given)
    key[:, :, 77] = held
    found = relative_attention(query, key, value, table, table, backend="cpu", **given)
    assert torch.equal(found[:, :, :77], truth[:, :, :77])
