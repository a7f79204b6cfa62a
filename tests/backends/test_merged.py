"""The backend `merged` from inside: how pairs fall into parts, blocks and windows, and its operators."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import (
    CASES,
    Case,
    attend,
    case,
    detached,
    make,
    operator_arguments,
    outcome,
)
from relpos import explain_backends, relative_attention
from relpos.backends.merged import partition
from relpos.backends.merged.band import Band
from relpos.backends.merged.far import Part, since, until

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

offsets = st.integers(-15, 15)
QKV = ("query", "key", "value")


def pairs(part: Part) -> list[tuple[int, int]]:
    """The pairs that a part says it has, as its docstring defines them."""
    queries = range(part.queries.start, part.queries.stop)
    keys = range(part.keys.start, part.keys.stop)
    if not part.is_triangle:
        return list(itertools.product(queries, keys))
    queries, keys = (list(x)[:: -1 if part.is_reversed else 1] for x in (queries, keys))
    return [(i, j) for a, i in enumerate(queries) for b, j in enumerate(keys) if b <= a]


@settings(deadline=None, database=None, derandomize=True)
@given(num_queries=st.integers(1, 12), num_keys=st.integers(1, 12), offset=offsets)
def test_parts_hold_each_pair_of_a_region_once(num_queries: int, num_keys: int, offset: int) -> None:
    everything = list(itertools.product(range(num_queries), range(num_keys)))
    for parts, region in (
        (until(num_queries, num_keys, offset), [(i, j) for i, j in everything if j <= i + offset]),
        (since(num_queries, num_keys, offset), [(i, j) for i, j in everything if j >= i + offset]),
    ):
        found = [pair for part in parts for pair in pairs(part)]
        assert sorted(found) == region
        for part in parts:
            assert {i for i, _ in pairs(part)} == set(range(part.queries.start, part.queries.stop))


@settings(deadline=None, database=None, derandomize=True)
@given(num_queries=st.integers(1, 12), num_keys=st.integers(1, 12), offset=offsets)
def test_triangles_are_square_and_parts_are_three_at_most(
    num_queries: int, num_keys: int, offset: int
) -> None:
    for parts in (until(num_queries, num_keys, offset), since(num_queries, num_keys, offset)):
        triangles = [part for part in parts if part.is_triangle]
        assert len(triangles) <= 1
        assert len(parts) <= 3
        for part in triangles:
            assert part.queries.stop - part.queries.start == part.keys.stop - part.keys.start


@settings(deadline=None, database=None, derandomize=True, max_examples=200)
@given(
    num_queries=st.integers(1, 70),
    num_keys=st.integers(1, 70),
    first=st.integers(-90, 90),
    width=st.integers(1, 40),
)
def test_band_reads_and_writes_the_pairs_along_its_diagonals(
    num_queries: int, num_keys: int, first: int, width: int
) -> None:
    band, groups, dim = Band(num_queries, num_keys, first, width), 2, 3
    x = torch.randn(groups, num_queries, dim, dtype=torch.float64)
    y = torch.randn(groups, num_keys, dim, dtype=torch.float64)
    j = first + torch.arange(num_queries)[:, None] + torch.arange(width)  # [query, width]
    exists = (j >= 0) & (j < num_keys)
    met = torch.where(exists[..., None], y[:, j.clamp(0, num_keys - 1)], 0)  # [group, query, width, dim]

    near = torch.zeros(groups, num_queries, width, dtype=torch.float64)
    band.add_diagonals(torch.bmm(band.blocks(x), band.windows(y).mT), near)
    torch.testing.assert_close(near, torch.einsum("gid,gijd->gij", x, met))

    weights = torch.randn_like(near)
    by_block = torch.bmm(band.spread(weights), band.windows(y))
    torch.testing.assert_close(band.rows(by_block, groups), torch.einsum("gij,gijd->gid", weights, met))

    total = torch.zeros(1, groups, num_keys, dim, dtype=torch.float64)
    band.add_windows(torch.bmm(band.spread(weights).mT, band.blocks(x)), total)
    truth = torch.zeros_like(total[0])
    for i, w in itertools.product(range(num_queries), range(width)):
        if exists[i, w]:
            truth[:, j[i, w]] += weights[:, i, w, None] * x[:, i]
    torch.testing.assert_close(total[0], truth)

    band.mask(near, -1.0)
    assert ((near == -1.0) == ~exists).all()


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize(
    "case", [x for x in CASES if x.mask is None and x.relations is None and x.num_queries > 2], ids=str
)
def test_pieces_of_any_size_equal_the_reference(
    case: Case, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_QUERIES", queries)
    monkeypatch.setattr(partition, "_SCRATCH", 1)
    arguments = make(case)
    found = outcome(*attend("merged", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-10, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "name", ["length 63, causal", "per head", "grouped heads, a start each", "values wider than keys"]
)
def test_operators_pass_opcheck(name: str) -> None:
    problem = [*operator_arguments(make(case(name))), True, True]
    torch.library.opcheck(torch.ops.relpos.merged.default, tuple(problem))
    plain = [y.detach() if isinstance(y, torch.Tensor) else y for y in problem]
    results = torch.ops.relpos.merged(*plain)
    grads = [torch.randn_like(y) for y in results[:2]]
    torch.library.opcheck(torch.ops.relpos.merged_backward.default, (*plain, *results, *grads, 31))


def test_sequences_do_not_touch_each_other() -> None:
    arguments = detached(make(case("length 63")), torch.float32)
    both = {
        name: torch.cat((x, x)) if name in ("query", "key", "value") else x for name, x in arguments.items()
    }
    for name in ("query", "key", "value"):
        both[name] = both[name].detach().clone()
        both[name][1] = float("nan")
        both[name].requires_grad_()
    alone, beside = (relative_attention(**x, backend="merged") for x in (arguments, both))
    torch.testing.assert_close(beside[0], alone[0])
    (grad,) = torch.autograd.grad(beside[0].square().sum(), both["key"])
    (truth,) = torch.autograd.grad(alone.square().sum(), arguments["key"])
    torch.testing.assert_close(grad[0], truth[0])


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits_equal_the_reference(size: float) -> None:
    arguments = make(case("length 63"))
    with torch.no_grad():
        arguments["query"].mul_(size)
    found = outcome(*attend("merged", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-9 * size, rtol=1e-8)


def test_what_it_cannot_do_is_said_reason_by_reason() -> None:
    arguments = make(case("mask: bool")) | {"dropout_p": 0.1}
    assert explain_backends(**arguments)["merged"] == [
        "takes no attn_mask but a bool one that hides keys at the end, and not while compiling",
        "has no dropout: give dropout_p=0.0, or layers attention_dropout=0.0",
    ]
    reasons = explain_backends(**make(case("relations for pairs")))["merged"]
    assert reasons == ["supports relative_attention only, not relation_attention"]
    meta = {x: torch.empty(1, 1, 4, 4, device="meta") for x in ("query", "key", "value")}
    reasons = explain_backends(**meta, rel_k=None, rel_v=None)["merged"]
    assert reasons == ["runs on the CPU and CUDA, and query is on meta"]


def test_a_second_derivative_is_refused_and_dense_has_it() -> None:
    arguments = make(case("length 17"))
    for backend in ("merged", "dense"):
        out = relative_attention(**arguments, backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), arguments["query"], create_graph=True)
        if backend == "dense":
            grad.sum().backward()
        else:
            with pytest.raises(NotImplementedError, match=r'no second derivative. Give backend="dense"'):
                grad.sum().backward()


def test_nothing_is_kept_for_a_backward_pass_that_will_not_come() -> None:
    x = torch.randn(1, 2, 40, 4)
    table = torch.randn(5, 4)
    for query, is_kept in ((x, False), (x.clone().requires_grad_(), True)):
        inputs = operator_arguments({"query": query, "key": x, "value": x, "rel_k": table, "rel_v": table})
        results = torch.ops.relpos.merged(*inputs, is_kept, is_kept)
        assert [bool(y.numel()) for y in results] == [True, is_kept, is_kept, is_kept]


@pytest.mark.parametrize("length", [32, 64, 1024])
@pytest.mark.parametrize("sides", [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_as_modules_lay_them_out_serve_bands_of_any_width(
    length: int, sides: tuple[int, int], is_causal: bool
) -> None:
    made = make(Case("any", num_queries=length, batch=1, left=sides[0], right=sides[1], is_causal=is_causal))
    given = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in made.items() if name in QKV}
    tables = [made["rel_k"], made["rel_v"]]
    outcomes = []
    for backend in ("merged", "dense"):
        leaves = [x.detach().requires_grad_() for x in (*given.values(), *tables)]
        out = relative_attention(*leaves, max_distance=sides, is_causal=is_causal, backend=backend)
        # as a module goes on with it
        grads = torch.autograd.grad(out.transpose(1, 2).flatten(2).square().sum(), leaves)
        outcomes.append((out, *grads))
    for found, truth in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, truth, atol=1e-9, rtol=1e-9)


def long_arguments(length: int = 1024) -> tuple[torch.Tensor, ...]:
    """Query, key, value and two tables for which merged comes before dense."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 8, length, 4, generator=generator) for _ in range(3)]
    tables = [torch.randn(5, 4, generator=generator) for _ in range(2)]
    explained = explain_backends(*qkv, *tables)
    assert explained["merged"] == []
    assert "merged" not in explained.later
    return (*qkv, *tables)


# torch builds its own rules of forward mode with what it deprecates
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_derivatives_are_left_to_dense() -> None:
    query, *others = long_arguments()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        assert explain_backends(dual, *others).chosen == "dense"
        tangent = torch.autograd.forward_ad.unpack_dual(relative_attention(dual, *others)).tangent
    assert tangent is not None
    assert tangent.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_programs_need_no_operator_of_ours() -> None:
    traced = torch.jit.trace(lambda *x: relative_attention(*x), long_arguments(), check_trace=False)
    assert "relpos::" not in str(traced.inlined_graph)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_of_lse_beyond_half_precision_stays_finite(dtype: torch.dtype) -> None:
    arguments = detached(make(case("length 63")), dtype)
    truth_arguments = detached(arguments, torch.float64)
    found, truth = (
        torch.autograd.grad(attend(backend, x)[1].sum() * 7e4, [x["query"], x["rel_k"]])
        for backend, x in (("merged", arguments), ("reference", truth_arguments))
    )
    # the gradient of each query fits, that of the table, a sum over all, is scaled down to compare
    for x, y in zip(found, truth, strict=True):
        bound = torch.finfo(dtype).max
        assert x[y.abs() < bound].isfinite().all()
        near = y.abs() < bound / 2
        torch.testing.assert_close(x[near].double() / 7e4, y[near] / 7e4, atol=0.05, rtol=0.02)


def test_wide_tables_are_cut_to_what_a_length_can_reach() -> None:
    arguments = make(Case("any", num_queries=9, left=3, right=2, is_per_head=True))
    wide, far = dict(arguments), 200_000
    for name in ("rel_k", "rel_v"):
        table = torch.nn.functional.pad(arguments[name].detach(), (0, 0, far, far))
        wide[name] = table.requires_grad_()
    wide["max_distance"] = (3 + far, 2 + far)
    found = outcome(*attend("merged", wide), wide)
    truth = outcome(*attend("dense", wide), wide)
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-10, rtol=1e-10)


def test_a_clip_without_tables_costs_nothing() -> None:
    query, key, value, *_ = long_arguments()
    plain = relative_attention(query, key, value, None, None, backend="merged")
    clipped = relative_attention(query, key, value, None, None, max_distance=10**9, backend="merged")
    assert torch.equal(plain, clipped)


@pytest.mark.parametrize("start", [-(2**62), 2**62])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("k", [0, 2])
def test_the_farthest_starts_equal_the_reference(start: int, is_causal: bool, k: int) -> None:
    arguments = make(
        Case("any", num_queries=4, num_keys=8, query_start=start, is_causal=is_causal, left=k, right=k)
    )
    for x in (arguments, arguments | {"query_start": torch.tensor([start, 3])}):
        found = outcome(*attend("merged", x), x)
        truth = outcome(*attend("reference", x), x)
        for name, y in truth.items():
            torch.testing.assert_close(found[name], y, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("without_kernel")
def test_tables_as_wide_as_half_the_keys_are_left_to_dense() -> None:
    x = torch.zeros(1, 1, 1, 1).expand(1, 8, 1024, 4)
    for k, chosen in ((256, "merged"), (257, "dense")):
        table = torch.zeros(2 * k + 1, 4)
        explained = explain_backends(x, x, x, table, table)
        assert explained.chosen == chosen
    assert "merged: fits, but is slower with fewer than 1,028 keys" in str(explained).splitlines()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_table_whose_gradient_is_zero_gets_no_noise_of_half_precision(dtype: torch.dtype) -> None:
    # one key takes all the weight, whatever the tables say
    arguments = detached(make(case("length 63")), dtype) | {"key_lengths": torch.tensor([1])}
    out = relative_attention(**arguments, backend="merged")
    (grad,) = torch.autograd.grad(out.square().sum(), arguments["rel_k"])
    assert grad.abs().max() < 1e-4
