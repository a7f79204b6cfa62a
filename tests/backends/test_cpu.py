"""The backend `cpu` as operators of torch: fake and real, autograd, compilation, layouts, what it refuses."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.cases import CASES, TENSORS, Case, attend, case, make, operator_arguments, outcome
from relpos import explain_backends, relation_attention, relative_attention
from relpos.backends.cpu import backend as cpu

pytestmark = [
    pytest.mark.usefixtures("nan_in_fresh_memory"),
    pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}"),
]

OPERATORS = (
    "length 63, causal",
    "per head",
    "tables: keys",
    "tables: neither",
    "grouped heads, a start each",
    "values wider than keys",
    "mask: float inf",
    "mask: bool",
    "length 257, key lengths",
    "layout: transposed, grouped, per head",
    "layout: expanded",
    "relations for batch",
    "batch 0, everything",
    "no key",
)


def problem(name: str, dropout_p: float = 0.0, dtype: torch.dtype = torch.float64) -> list:
    """The arguments of the operator for a case."""
    return operator_arguments(make(case(name), dtype), dropout_p)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "dropout_p"), [*((name, 0.0) for name in OPERATORS), ("per head", 0.3), ("mask: bool", 0.3)]
)
def test_operators_pass_opcheck(name: str, dropout_p: float) -> None:
    arguments = problem(name, dropout_p)
    torch.library.opcheck(torch.ops.relpos.cpu.default, tuple(arguments))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    out, lse = torch.ops.relpos.cpu(*plain)
    for grad_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            torch.ops.relpos.cpu_backward.default, (*plain, out, lse, torch.randn_like(out), grad_lse, 31)
        )


def strides(x: Tensor) -> list[int]:
    """Steps between elements, where there are several."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (1, 1, 1, 1), (2, 3, 5, 1)], ids=str
)
def test_fake_results_lie_as_real_ones_do(shape: tuple, order: tuple, dtype: torch.dtype) -> None:
    laid = [torch.randn([shape[d] for d in order]).to(dtype).permute(order) for _ in range(3)]
    rest = (
        torch.randn(3, shape[3]),
        torch.randn(3, shape[3]),
        None,
        None,
        None,
        0,
        None,
        1,
        1,
        False,
        None,
        0.0,
        1.0,
    )
    out, lse = torch.ops.relpos.cpu(*laid, *rest)
    assert out.shape == shape
    grads = torch.ops.relpos.cpu_backward(*laid, *rest, out, lse, torch.ones_like(out), None, 31)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in (*laid, *rest)]
        fake_out, fake_lse = torch.ops.relpos.cpu(*fakes)
        fake_grads = torch.ops.relpos.cpu_backward(*fakes, fake_out, fake_lse, fake_out, None, 31)
    for fake, real in zip((fake_out, fake_lse, *fake_grads), (out, lse, *grads), strict=True):
        assert fake.shape == real.shape
        assert fake.dtype == real.dtype
        assert strides(fake) == strides(real)


def test_heads_that_lie_beside_one_another_give_results_that_do() -> None:
    x = [torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = relative_attention(*x, None, None, backend="cpu")
    # what follows joins the heads, and needs no copy to do it
    assert out.transpose(1, 2).is_contiguous()
    for grad in torch.autograd.grad(out.sum(), x):
        assert grad.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("pulled", ["expanded", "permuted", "lse alone", "out alone"])
def test_gradients_that_come_in_any_layout_are_read_right(pulled: str) -> None:
    grads = []
    for backend in ("cpu", "reference"):
        arguments = make(case("left over right"))
        out, lse = attend(backend, arguments)
        torch.manual_seed(0)
        grad_out = torch.randn(out.shape, dtype=out.dtype)
        if pulled == "expanded":
            grad_out = grad_out[:, :1, :, :1].expand(out.shape)
        elif pulled == "permuted":
            grad_out = grad_out.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        grad_lse = torch.randn(lse.shape[::-1], dtype=lse.dtype).permute(2, 1, 0)
        roots = {"lse alone": [lse], "out alone": [out]}.get(pulled, [out, lse])
        given = [grad_out if x is out else grad_lse for x in roots]
        leaves = [arguments[name] for name in TENSORS]
        grads.append(torch.autograd.grad(roots, leaves, given, allow_unused=True, materialize_grads=True))
    for found, truth in zip(*grads, strict=True):
        torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("attention", [relative_attention, relation_attention])
def test_one_compiled_graph_serves_lengths_that_change_forward_and_backward(attention) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for n in (5, 9, 64, 65, 130, 40):
        labels = {"relations": "pairs"} if attention is relation_attention else {"is_causal": True}
        arguments = make(Case("any", num_queries=n, key_lengths=(n, n - 2), layout="transposed", **labels))
        truth = outcome(*attend("cpu", arguments), arguments)
        found = outcome(*compiled(**arguments, return_lse=True, backend="cpu"), arguments)
        for name, x in truth.items():
            torch.testing.assert_close(found[name], x, atol=1e-12, rtol=1e-12)
    assert counter.frame_count <= 2


@pytest.mark.slow
# inductor imports what torch itself has deprecated
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_lays_out_what_the_kernel_gives_and_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a graph that was kept knows the operator as it was then
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def layer(x: Tensor, table: Tensor) -> Tensor:
        heads = [(x * factor).unflatten(2, (2, 4)).transpose(1, 2) for factor in (1.0, 2.0, 3.0)]
        out = relative_attention(*heads, table, table, is_causal=True, backend="cpu")
        return out.transpose(1, 2).flatten(2) + x

    compiled = torch.compile(layer, fullgraph=True)
    for n in (1, 5, 9):
        x, table = torch.randn(3, n, 8, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        for found, truth in zip(
            *(
                (y, *torch.autograd.grad(y.square().sum(), (x, table)))
                for y in (compiled(x, table), layer(x, table))
            ),
            strict=True,
        ):
            torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["per head", "grouped heads, a start each", "relations for batch", "no key"])
@pytest.mark.parametrize("wanted", [0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b10100, 0b11000, 0b01101])
def test_gradients_that_are_asked_for_are_the_same_without_the_others(name: str, wanted: int) -> None:
    plain = [x.detach() if isinstance(x, Tensor) else x for x in problem(name)]
    out, lse = torch.ops.relpos.cpu(*plain)
    rest = (*plain, out, lse, torch.randn_like(out), torch.randn_like(lse))
    every = torch.ops.relpos.cpu_backward(*rest, 31)
    some = torch.ops.relpos.cpu_backward(*rest, wanted)
    for i in range(5):
        if wanted >> i & 1:
            assert torch.equal(some[i], every[i])
        else:
            assert some[i].numel() == 0


@pytest.mark.parametrize("is_by_head", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(43, 3), (129, 1), (2, 129)])
def test_tables_get_the_gradients_of_every_head_where_there_are_more_than_groups(
    batch: int, heads: int, is_by_head: bool
) -> None:
    arguments = make(
        Case("any", batch=batch, heads=heads, is_per_head=is_by_head, num_queries=5, left=2, right=3)
    )
    found = outcome(*attend("cpu", arguments), arguments)
    for name, x in outcome(*attend("reference", arguments), arguments).items():
        torch.testing.assert_close(found[name], x, atol=1e-10, rtol=1e-10)


def test_what_is_kept_may_come_back_in_another_layout() -> None:
    arguments = make(case("grouped heads, a start each"))
    truth = outcome(*attend("cpu", arguments), arguments)
    turned = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.mT.contiguous() if x.dim() > 1 else x, lambda x: x.mT if x.dim() > 1 else x
    )
    with turned:
        found = outcome(*attend("cpu", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-12, rtol=1e-12)


def test_nothing_is_kept_where_nothing_needs_a_gradient() -> None:
    arguments = make(case("per head"))
    with torch.no_grad():
        assert relative_attention(**arguments, backend="cpu").grad_fn is None
    plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    assert relative_attention(**plain, backend="cpu").grad_fn is None
    with torch.inference_mode():
        inferred = relative_attention(**plain, backend="cpu")
    assert inferred.is_inference()
    assert torch.equal(inferred, relative_attention(**arguments, backend="cpu"))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_both_ways_to_autograd_give_the_same_bits(is_compiled: bool) -> None:
    """Uncompiled calls reach the operator's autograd by a shorter way than the one that is registered."""
    arguments = problem("length 257, key lengths")
    operator = (
        torch.compile(torch.ops.relpos.cpu, backend="aot_eager") if is_compiled else torch.ops.relpos.cpu
    )
    grads = []
    for attention in (operator, cpu._attend):
        out, lse = attention(*arguments)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), arguments[:5]))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_a_second_derivative_is_refused_and_dense_has_it() -> None:
    arguments = make(case("left over right"))
    for backend in ("cpu", "dense"):
        out = relative_attention(**arguments, backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), arguments["rel_k"], create_graph=True)
        if backend == "dense":
            assert torch.autograd.grad(grad.sum(), arguments["rel_k"])[0].isfinite().all()
            continue
        with pytest.raises(
            NotImplementedError, match=r'"cpu" has no second derivative\. Give backend="dense"'
        ):
            torch.autograd.grad(grad.sum(), arguments["rel_k"])


def test_what_is_changed_before_the_backward_pass_is_an_error() -> None:
    for name in ("query", "attn_mask"):
        arguments = make(case("mask: bool"))
        out = relative_attention(**arguments, backend="cpu")
        with torch.no_grad():
            arguments[name].fill_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_many_gradients_at_once_are_one_call_for_each() -> None:
    arguments = make(case("left over right"))
    leaves = [arguments[name] for name in TENSORS]
    out = relative_attention(**arguments, backend="cpu")
    pulled = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, pulled, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(out, leaves, pulled[i], retain_graph=True)
        torch.testing.assert_close([x[i] for x in found], list(each))


def test_masks_that_need_a_gradient_are_left_to_dense() -> None:
    arguments = make(case("mask: float"))
    arguments["attn_mask"].requires_grad_()
    assert explain_backends(**arguments)["cpu"] == ["has no gradient for attn_mask"]
    assert explain_backends(**arguments).chosen == "dense"
    with torch.no_grad():
        assert explain_backends(**arguments)["cpu"] == []
        # a reentrant checkpoint comes back with gradients, and must drop the same weights
        assert explain_backends(**arguments, dropout_p=0.1).chosen == "dense"


def test_a_kernel_with_other_signatures_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "VERSION", cpu.VERSION + 1)
    assert "from other sources" in str(cpu._load())


def test_every_reason_is_said() -> None:
    with torch.device("meta"):
        x = torch.zeros(1, 1, 4, 8)
        mask = torch.zeros(4, 4, requires_grad=True)
    assert explain_backends(x, x, x, None, None, attn_mask=mask)["cpu"] == [
        "runs on the CPU alone, and query is on meta",
        "has no gradient for attn_mask",
    ]


@pytest.mark.parametrize("mixed", ["float64 tables", "one float64 table", "autocast", "low tables"])
def test_tensors_of_several_dtypes_are_summed_in_the_widest(mixed: str) -> None:
    arguments = make(case("per head"), torch.float32)
    with torch.no_grad():
        if mixed == "float64 tables":
            arguments |= {x: arguments[x].double().requires_grad_() for x in ("rel_k", "rel_v")}
        elif mixed == "one float64 table":
            arguments["rel_v"] = arguments["rel_v"].double().requires_grad_()
        elif mixed == "low tables":
            arguments |= {x: arguments[x].bfloat16().requires_grad_() for x in ("rel_k", "rel_v")}
        else:
            arguments["key"] = arguments["key"].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast"):
        outcomes = [outcome(*attend(x, arguments), arguments) for x in ("cpu", "reference")]
    tolerance = 0.02 if mixed in ("autocast", "low tables") else 1e-6
    for name, truth in outcomes[1].items():
        assert outcomes[0][name].dtype == truth.dtype
        torch.testing.assert_close(outcomes[0][name], truth, atol=tolerance, rtol=tolerance)


def test_a_default_device_and_views_that_are_negated_change_nothing() -> None:
    arguments = make(case("left over right"))
    torch.manual_seed(0)
    truth = relative_attention(**arguments, dropout_p=0.3, backend="cpu")
    negated = torch.complex(arguments["query"], -arguments["query"]).conj().imag
    assert negated.is_neg()
    torch.manual_seed(0)
    with torch.device("meta"):
        found = relative_attention(**arguments | {"query": negated}, dropout_p=0.3, backend="cpu")
    assert torch.equal(found, truth)


def test_the_kernel_is_what_runs_by_default() -> None:
    for x in CASES:
        arguments = make(x)
        if x.num_queries and x.batch:
            assert explain_backends(**arguments).chosen == "cpu"
