"""Every backend against the reference in float64, case by case."""

import math

import pytest
import torch

from conformance.cases import CASES, Case, attend, case, detached, integers, make, outcome, plain_attention
from conformance.skips import each_backend
from relpos import relation_attention, relative_attention

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

backends = pytest.mark.parametrize("backend", each_backend())

LOW_PRECISION_CASES = (
    "length 17",
    "length 128",
    "left over right",
    "per head",
    "tables: tied",
    "tables: values",
    "length 63, causal",
    "mask: float",
    "scale",
    "grouped heads, low precision",
    "length 257, key lengths",
    "relations for pairs",
)


def assert_same(
    found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        assert found[name] is not None, f"{name} is None"
        torch.testing.assert_close(
            found[name], x, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@backends
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backend_equals_the_reference(backend: str, case: Case) -> None:
    arguments = make(case)
    found = outcome(*attend(backend, arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    assert_same(found, truth)
    assert found["out"].isfinite().all()
    assert not found["lse"].isnan().any()


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOW_PRECISION_CASES)
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    if name == "grouped heads, low precision":
        given = make(Case(name, heads=6, key_heads=2, num_queries=17), dtype)
    else:
        given = make(case(name), dtype)
    found_arguments, plain_arguments, true_arguments = (
        detached(given, x) for x in (None, None, torch.float64)
    )
    found = outcome(*attend(backend, found_arguments), found_arguments)
    plain = outcome(*plain_attention(plain_arguments), plain_arguments)
    truth = outcome(*attend("reference", true_arguments), true_arguments)
    assert found["out"].dtype == dtype
    assert found["lse"].dtype == torch.float32
    for part, x in truth.items():
        error, plain_error = ((y[part].double() - x).abs().max().item() for y in (found, plain))
        # where plain torch happens to be exact, one rounding of the largest number remains; and a backward
        # pass that finds its weights again from lse errs by the rounding of that, which is kept in float32
        rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * truth["lse"].abs().max().item()
        rounding *= x.abs().max().item()
        assert error <= 2 * plain_error + rounding, f"{part}: {error} against {plain_error}"


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tables_may_stay_float32_beside_a_low_precision_query(backend: str, dtype: torch.dtype) -> None:
    given = make(case("length 17"))
    low = {
        name: x.to(dtype) if name in ("query", "key", "value") else x for name, x in detached(given).items()
    }
    low["rel_k"], low["rel_v"] = (low[name].float() for name in ("rel_k", "rel_v"))
    arguments = detached(low)
    truth_arguments = detached(low, torch.float64)
    found = outcome(*attend(backend, arguments), arguments)
    truth = outcome(*attend("reference", truth_arguments), truth_arguments)
    assert found["out"].dtype == dtype
    assert found["grad of rel_k"].dtype == found["grad of rel_v"].dtype == torch.float32
    for name, x in truth.items():
        torch.testing.assert_close(found[name].double(), x, atol=0.05, rtol=0.05)


@backends
@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf, 3e38, 1e19])
@pytest.mark.parametrize("spoilt", [("key",), ("value",), ("key", "value")], ids=" and ".join)
def test_what_keys_beyond_the_length_hold_changes_nothing(
    backend: str, spoilt: tuple[str, ...], held: float
) -> None:
    # 257 keys end within several blocks of the kernel; the interpreter of triton takes its time for each
    n, end = (70, 40) if backend == "triton" else (257, 200)
    arguments = detached(make(Case("any", num_queries=n, left=8, right=8)), torch.float32)
    arguments["key_lengths"] = integers(end, 0)
    given = detached(arguments)
    with torch.no_grad():
        for name in spoilt:
            given[name][0, :, end:] = held
            given[name][1] = held
    found = outcome(*attend(backend, given), given)
    assert_same(found, outcome(*attend(backend, arguments), arguments), tolerance=1e-5)
    for name in ("grad of key", "grad of value"):
        assert (found[name][0, :, end:] == 0).all()
        assert (found[name][1] == 0).all()


@backends
@pytest.mark.parametrize("large", ["query", "scale", "grad_out", "grad_lse"])
@pytest.mark.parametrize("held", [1e8, 1e19, math.nan])
def test_keys_beyond_the_length_change_nothing_beside_large_numbers(
    backend: str, large: str, held: float
) -> None:
    arguments = detached(make(case("length 17")), torch.float32) | {"key_lengths": integers(11)}
    with torch.no_grad():
        if large == "query":
            arguments["query"].mul_(1e31)
            arguments["key"].mul_(1e-31)
        arguments["rel_k"].mul_(0.0)
    if large == "scale":
        arguments["scale"] = 1e31
        with torch.no_grad():
            arguments["key"].mul_(1e-31)
    given = detached(arguments)
    with torch.no_grad():
        given["key"][:, :, 11:], given["value"][:, :, 11:] = held, held
    grads = {"grad_out": (1e31, 0.0), "grad_lse": (0.0, 1e31)}.get(large, (1.0, 0.0))
    outcomes = []
    for name, x in ((backend, given), ("reference", arguments)):
        out, lse = attend(name, x)
        leaves = [x["query"], x["key"], x["value"]]
        pulled = torch.autograd.grad(
            [out, lse], leaves, [torch.full_like(y, g) for y, g in zip((out, lse), grads, strict=True)]
        )
        outcomes.append((out, lse, *pulled))
    for found, truth in zip(*outcomes, strict=True):
        assert truth.isfinite().all()
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4 * truth.abs().max().item())


@backends
def test_a_float_mask_gets_its_gradient(backend: str) -> None:
    arguments = make(case("mask: float inf"))
    arguments["attn_mask"] = arguments["attn_mask"].requires_grad_()
    grads = []
    for name in (backend, "reference"):
        out, lse = attend(name, arguments)
        grads.append(
            torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), arguments["attn_mask"])[0]
        )
    torch.testing.assert_close(*grads, atol=1e-10, rtol=1e-10)
    assert (grads[0][arguments["attn_mask"] == -math.inf] == 0).all()


@backends
def test_gradients_that_come_as_one_number_for_all_are_read_as_such(backend: str) -> None:
    arguments = make(case("length 17"))
    leaves = [arguments[name] for name in ("query", "key", "value", "rel_k", "rel_v")]
    for reduce in (lambda out, lse: out.sum() + 2 * lse.sum(), lambda out, lse: 0 * out.sum() + lse.sum()):
        grads = [torch.autograd.grad(reduce(*attend(x, arguments)), leaves) for x in (backend, "reference")]
        for found, truth in zip(*grads, strict=True):
            torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-10)


@backends
@pytest.mark.parametrize("needed", ["query", "key", "value", "rel_k", "rel_v"])
def test_each_tensor_alone_can_need_a_gradient(backend: str, needed: str) -> None:
    arguments = make(case("more keys than queries"))
    (truth,) = torch.autograd.grad(attend("reference", arguments)[0].square().sum(), arguments[needed])
    alone = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    alone[needed].requires_grad_()
    (found,) = torch.autograd.grad(attend(backend, alone)[0].square().sum(), alone[needed])
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-10)


# cpu and triton draw numbers of their own: tests/backends/test_dropout.py
@pytest.mark.parametrize("backend", each_backend("cpu", "triton"))
@pytest.mark.parametrize("name", ["per head", "a start for each sequence, causal", "mask: float inf"])
def test_dropout_with_one_seed_equals_the_reference(backend: str, name: str) -> None:
    arguments = make(case(name)) | {"dropout_p": 0.4}
    outcomes = []
    for x in (backend, "reference"):
        torch.manual_seed(7)
        outcomes.append(outcome(*attend(x, arguments), arguments))
    assert_same(*outcomes)


@backends
@pytest.mark.parametrize(
    "name",
    [
        "length 17",
        "relations for batch",
        "length 63, causal",
        "chunk of a static cache",
        "a start for each sequence, causal",
        "queries before all keys, causal",
        "grouped heads, a start each",
        "one sentence is empty",
        "float mask, lengths and causal",
        "k = 0, causal, per head",
        "layout: transposed",
    ],
)
def test_compiled_backend_equals_the_reference(backend: str, name: str) -> None:
    arguments = make(case(name))
    truth = outcome(*attend("reference", arguments), arguments)
    attend(backend, arguments)
    torch._dynamo.reset()
    attention = relation_attention if "relations" in arguments else relative_attention
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = outcome(*compiled(**arguments, return_lse=True, backend=backend), arguments)
    assert_same(found, truth)


@backends
def test_checkpointed_backend_gives_the_same_gradients(backend: str) -> None:
    arguments = make(case("mask, lengths and causal"))
    truth = outcome(*attend(backend, arguments), arguments)
    checkpointed = torch.utils.checkpoint.checkpoint(
        lambda *tensors: attend(backend, arguments | dict(zip(("query", "rel_k"), tensors, strict=True))),
        arguments["query"],
        arguments["rel_k"],
        use_reentrant=False,
    )
    assert_same(outcome(*checkpointed, arguments), truth)


@backends
def test_two_parts_of_the_keys_merge_and_a_query_with_no_key_in_either_has_no_gradients(backend: str) -> None:
    arguments = make(case("no key")) | {"attn_mask": None, "query_start": -2, "is_causal": True}
    tensors = [arguments[name] for name in ("query", "key", "value", "rel_k", "rel_v")]
    _, first = attend(backend, arguments)
    _, second = attend(backend, arguments)
    merged = torch.logaddexp(first, second)
    # of -inf and -inf the gradient is no number, and it comes back to queries without a key
    grads = torch.autograd.grad(merged[merged.isfinite()].sum(), tensors, allow_unused=True)
    assert not any(x.isnan().any() for x in grads if x is not None)
