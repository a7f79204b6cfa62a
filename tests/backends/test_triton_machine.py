"""The backend `triton` as operators of torch, interpreted: what they launch, compile to, refuse, and read.

Also who chooses it, and what happens where Triton is missing.
"""

import math
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import TENSORS, Case, attend, case, make, operator_arguments, outcome
from relpos import explain_backends, relation_attention, relative_attention
from relpos.backends.triton import backend as triton

if triton.UNAVAILABLE is not None or not triton.IS_INTERPRETED:
    pytest.skip(f"triton: {triton.UNAVAILABLE or 'is not interpreted'}", allow_module_level=True)

from relpos.backends.triton import launch

pytestmark = pytest.mark.interpreted


class Launches(list[tuple[str, dict[str, Any]]]):
    """The kernels that are launched, by name, and what is compiled in."""

    def __call__(self, kernel: Any) -> Any:
        """Take the place of `wrap_triton`."""
        launches = self

        class Recorded:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *given, **options: (
                    launches.append((kernel.fn.__name__, options)),
                    kernel[grid](*given, **options),
                )

        return Recorded()

    @property
    def names(self) -> list[str]:
        """In the order of launches."""
        return [name for name, _ in self]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    recorded = Launches()
    monkeypatch.setattr(launch, "wrap_triton", recorded)
    return recorded


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(given: Case, dropout_p: float = 0.0) -> list:
    """The arguments of the operator for a case; the last says that gradients may follow."""
    return [*operator_arguments(make(given), dropout_p), True]


@pytest.mark.parametrize(
    ("name", "dropout_p"),
    [
        ("left only, causal", 0.3),
        ("mask: float inf", 0.3),
        ("relations for batch", 0.3),
        ("batch 0, everything", 0.0),
        ("no key", 0.0),
    ],
)
@pytest.mark.usefixtures("nan_in_fresh_memory")
def test_operators_pass_opcheck(name: str, dropout_p: float) -> None:
    arguments = problem(case(name), dropout_p)
    torch.library.opcheck(torch.ops.relpos.triton.default, tuple(arguments))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    results = torch.ops.relpos.triton(*plain)
    out, lse = results[:2]
    given = (*plain, *results, torch.randn_like(out), torch.randn_like(lse), 31)
    torch.library.opcheck(torch.ops.relpos.triton_backward.default, given)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize(("dtype", "keeps_rest"), [(torch.float32, True), (torch.bfloat16, True)], ids=str)
def test_fake_results_lie_as_real_ones_do(order: tuple, dtype: torch.dtype, keeps_rest: bool) -> None:
    laid = [torch.randn([(2, 3, 5, 4)[d] for d in order]).to(dtype).permute(order) for _ in range(3)]
    tables = (torch.randn(3, 4), torch.randn(3, 4))
    rest = (
        *tables,
        None,
        torch.zeros(5, 5)[None, None],
        None,
        0,
        None,
        1,
        1,
        False,
        None,
        0.0,
        1.0,
        keeps_rest,
    )
    results = torch.ops.relpos.triton(*laid, *rest)
    grads = torch.ops.relpos.triton_backward(*laid, *rest, *results, torch.ones_like(results[0]), None, 31)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in (*laid, *rest)]
        fake_results = torch.ops.relpos.triton(*fakes)
        fake_grads = torch.ops.relpos.triton_backward(*fakes, *fake_results, fake_results[0], None, 31)
    for fake, real in zip((*fake_results, *fake_grads), (*results, *grads), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("labels", [None, "heads"])
def test_what_needs_no_gradient_costs_no_kernel_and_changes_no_other(
    labels: str | None, launches: Launches
) -> None:
    given = Case("any", batch=1, heads=1, relations=labels)
    plain = [x.detach() if isinstance(x, Tensor) else x for x in problem(given)]
    results = torch.ops.relpos.triton(*plain)
    given = (*plain, *results, torch.randn_like(results[0]), torch.randn_like(results[1]))
    every = torch.ops.relpos.triton_backward(*given, 31)
    # none, each alone, every one, and neighbours
    for needs in (0, 1, 2, 4, 8, 16, 31, 6, 24):
        launches.clear()
        some = torch.ops.relpos.triton_backward(*given, needs)
        for i in range(5):
            if needs >> i & 1:
                assert torch.equal(some[i], every[i])
            else:
                assert some[i].numel() == 0
        assert launches.names.count("key_value_gradients") == bool(needs & 0b00110)
        assert launches.names.count("query_gradients") == bool(needs & 0b11001)
        assert launches.names.count("table_gradients") == (needs >> 3 & 1) + (needs >> 4 & 1)


def test_a_tensor_that_needs_no_gradient_gets_none() -> None:
    arguments = make(case("left over right"))
    arguments["value"] = arguments["value"].detach()
    relative_attention(**arguments, backend="triton").sum().backward()
    assert arguments["value"].grad is None
    assert arguments["rel_v"].grad is not None


@pytest.mark.parametrize("tables", ["neither", "keys"])
def test_without_tables_there_is_no_memory_for_labels(tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = launch.Call.scratch
    monkeypatch.setattr(
        launch.Call, "scratch", lambda *given: taken.append(real(*given).numel()) or real(*given)
    )
    arguments = make(Case("any", num_queries=9, tables=tables))
    outcome(*attend("triton", arguments), arguments)
    # 2 sequences, 2 heads, 9 queries, labels rounded up to 16: forward, backward of keys, backward of values
    assert taken == ([0, 0, 0] if tables == "neither" else [576, 576, 0])


@pytest.mark.parametrize(("told", "wanted"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_float32_is_exact_unless_torch_is_told_otherwise(told: str, wanted: str, launches: Launches) -> None:
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    try:
        torch.set_float32_matmul_precision(told)
        arguments = make(case("left over right"), torch.float32)
        outcome(*attend("triton", arguments), arguments)
    finally:
        torch.set_float32_matmul_precision(before)
    assert launches.names == [
        *("forward", "prepare", "key_value_gradients", "query_gradients"),
        *["table_gradients"] * 2,
    ]
    assert {options["PRECISION"] for _, options in launches} == {wanted}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("attention", [relative_attention, relation_attention])
def test_one_compiled_graph_serves_lengths_that_change_forward_and_backward(attention) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for n in (5, 9, 12):
        labels = {"relations": "pairs"} if attention is relation_attention else {"is_causal": True}
        arguments = make(Case("any", num_queries=n, key_lengths=(n, n - 2), layout="transposed", **labels))
        truth = outcome(*attend("triton", arguments), arguments)
        found = outcome(*compiled(**arguments, return_lse=True, backend="triton"), arguments)
        for name, x in truth.items():
            torch.testing.assert_close(found[name], x, atol=1e-12, rtol=1e-12)
    assert counter.frame_count <= 2


def test_what_cannot_be_taken_apart_is_refused_and_says_why() -> None:
    x, table = torch.randn(1, 2, 4, 8), torch.randn(3, 8)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return relative_attention(x, x, x, table, table, backend="triton")

    with pytest.raises(
        Exception, match="triton: is an operator of relpos, which no exported program should need"
    ):
        torch.export.export(Module(), (x,), strict=False)
    with pytest.raises(
        NotImplementedError, match=r"has no rules for torch\.func and forward-mode derivatives"
    ):
        torch.func.vmap(Module())(x[None])


def test_a_second_derivative_is_refused() -> None:
    arguments = make(case("left over right"))
    out = relative_attention(**arguments, backend="triton")
    (grad,) = torch.autograd.grad(out.square().sum(), arguments["rel_k"], create_graph=True)
    with pytest.raises(
        NotImplementedError, match=r'"triton" has no second derivative\. Give backend="dense"'
    ):
        torch.autograd.grad(grad.sum(), arguments["rel_k"])


def test_nothing_is_kept_where_nothing_needs_a_gradient(launches: Launches) -> None:
    arguments = make(case("left over right"), torch.bfloat16)
    truth = relative_attention(**arguments, backend="triton")
    with torch.no_grad():
        assert relative_attention(**arguments, backend="triton").grad_fn is None
    with torch.inference_mode():
        inferred = relative_attention(**arguments, backend="triton")
    assert inferred.is_inference()
    # weights are divided by their sum as rounded where gradients follow, and by their very sum elsewhere
    torch.testing.assert_close(inferred, truth, atol=0.01, rtol=0.01)
    # what 16 bits cannot hold of the output is for the backward pass alone
    assert [options["HAS_REST"] for _, options in launches] == [True, False, False]


def test_autocast_leaves_tables_in_float32_beside_bfloat16() -> None:
    arguments = make(case("per head"), torch.float32)
    with torch.no_grad():
        for name in ("query", "key", "value"):
            arguments[name] = arguments[name].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, truth = (outcome(*attend(x, arguments), arguments) for x in ("triton", "reference"))
    for name, x in truth.items():
        assert found[name].dtype == x.dtype
        torch.testing.assert_close(found[name], x, atol=0.02, rtol=0.02)
    assert found["grad of rel_k"].dtype == torch.float32


@pytest.mark.parametrize("start", [0, 12])
def test_tensors_in_any_order_and_place_are_read_right(start: int) -> None:
    order = (3, 1, 0, 2)
    given = make(
        Case("any", num_queries=20, batch=2, heads=2, left=3, right=1, query_start=start, mask="heads")
    )
    for name in TENSORS:
        x = given[name].detach()
        if x.dim() == 4:
            # turned, every other number of what is between others
            wide = torch.full([2 * x.shape[d] + 3 for d in order], math.nan, dtype=x.dtype)
            back = [order.index(d) for d in range(4)]
            room = wide.permute(back)[tuple(slice(2, 2 + 2 * size, 2) for size in x.shape)]
        else:
            room = torch.full((x.shape[1] + 2, 3 * x.shape[0]), math.nan, dtype=x.dtype).mT[1::3, 1:-1]
        given[name] = room.copy_(x).requires_grad_()
    given["attn_mask"] = given["attn_mask"].mT.contiguous().mT.expand(2, 2, 20, 20)
    found, truth = (outcome(*attend(name, given), given) for name in ("triton", "reference"))
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pulled", ["expanded", "permuted", "lse alone", "out alone"])
def test_gradients_that_come_in_any_layout_are_read_right(pulled: str) -> None:
    given = make(case("left over right"))
    leaves = [given[name] for name in TENSORS]
    torch.manual_seed(0)
    grads = [torch.randn(2, 2, 9, 4, dtype=torch.float64), torch.randn(2, 2, 9, dtype=torch.float64)]
    if pulled == "expanded":
        grads = [grads[0][:, :1, :, :1].expand(2, 2, 9, 4), grads[1][:1, :, :1].expand(2, 2, 9)]
    elif pulled == "permuted":
        grads = [x.mT.contiguous().mT for x in grads]
    kept = {"lse alone": slice(1, 2), "out alone": slice(0, 1)}.get(pulled, slice(2))
    results = [
        torch.autograd.grad(attend(name, given)[kept], leaves, grads[kept], allow_unused=True)
        for name in ("triton", "reference")
    ]
    for found, truth in zip(*results, strict=True):
        torch.testing.assert_close(
            found, torch.zeros_like(found) if truth is None else truth, atol=1e-10, rtol=1e-10
        )


@pytest.mark.parametrize("layout", ["every other", "of a byte each"])
def test_starts_and_lengths_in_any_layout_are_read_right(layout: str) -> None:
    given = make(Case("any", num_queries=5, num_keys=9, query_start=(1, 3), key_lengths=(4, 7)))
    for name in ("query_start", "key_lengths"):
        x = given[name]
        wide = torch.stack([x, torch.full_like(x, -1000)], 1).flatten()
        other = {"every other": wide[::2], "of a byte each": x.to(torch.uint8)}
        given[name] = other[layout]
    found, truth = (outcome(*attend(name, given), given) for name in ("triton", "reference"))
    for name, x in truth.items():
        torch.testing.assert_close(found[name], x, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mask: float inf", torch.float64), ("per head", torch.bfloat16)]
)
def test_what_is_kept_may_come_back_in_another_layout(name: str, dtype: torch.dtype) -> None:
    given = make(case(name), dtype)
    truth = outcome(*attend("triton", given), given)
    turned = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.mT.contiguous() if x.dim() > 1 else x, lambda x: x.mT if x.dim() > 1 else x
    )
    with turned:
        found = outcome(*attend("triton", given), given)
    for key, x in truth.items():
        torch.testing.assert_close(found[key], x, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("far", [2**23 + 64, 2**31 + 64])
@pytest.mark.parametrize("along", ["heads", "rows"])
def test_strides_that_a_small_integer_does_not_count_are_followed(far: int, along: str) -> None:
    # pages that nobody touches cost nothing, where the system is told to set none aside
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, 4 * far + 8192, flags=flags), dtype=torch.float16)
    strides = (0, far, 4, 1) if along == "heads" else (0, 8, far, 1)
    rows = [memory.as_strided((1, 2, 2, 4), strides, at) for at in range(0, 128, 32)]
    for x in rows:
        x.copy_(torch.randn(1, 2, 2, 4))
    mask = memory.view(torch.bool).as_strided((2, 2), (2 * far, 1), 256)
    mask.copy_(torch.tensor([[True, False], [True, True]]))
    labels = memory.view(torch.int16).as_strided((2, 2), (far, 1), 160)
    labels.copy_(torch.tensor([[0, 1], [2, -1]]))
    leaves = [x.detach().requires_grad_() for x in (*rows[:3], torch.randn(3, 4), torch.randn(3, 4))]
    results = []
    for backend in ("triton", "reference"):
        out = relation_attention(*leaves[:3], labels, *leaves[3:], attn_mask=mask, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, rows[3])))
    for found, truth in zip(*results, strict=True):
        torch.testing.assert_close(found, truth, atol=2e-3, rtol=2e-3)


def test_lengths_and_starts_that_a_compiled_call_cannot_check_reach_no_other_memory() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 40, 8) for _ in range(3)]
    table = torch.randn(5, 8)

    def results(starts: tuple[int, int], lengths: tuple[int, int]) -> list[Tensor]:
        numbers = (torch.tensor(starts), 0, torch.tensor(lengths))
        given = (*tensors, table, table, None, None, *numbers, 2, 2, True, None, 0.0, 0.5, True)
        found = torch.ops.relpos.triton(*given)
        grads = torch.ops.relpos.triton_backward(*given, *found, torch.ones_like(found[0]), None, 31)
        return [*found, *grads]

    for wrong, right in (
        (((0, 0), (41, 2**40)), ((0, 0), (40, 40))),
        (((0, 0), (-1, -(2**63))), ((0, 0), (0, 0))),
        (((2**63 - 1, -(2**63)), (40, 40)), ((2**62, -(2**62)), (40, 40))),
    ):
        assert all(torch.equal(x, y) for x, y in zip(results(*wrong), results(*right), strict=True))


def test_what_is_interpreted_is_never_chosen_and_says_so(launches: Launches) -> None:
    for name in ("length 17", "relations for batch", "mask: float inf"):
        arguments = make(case(name))
        table = explain_backends(**arguments)
        assert table["triton"] == []
        assert next(iter(table)) == "triton"
        assert table.chosen != "triton"
        assert "triton: fits, but is interpreted, which takes long\n" in str(table)
        attention = relation_attention if "relations" in arguments else relative_attention
        attention(**arguments)
    assert launches == []


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_every_reason_is_said_and_none_reads_as_two(
    is_interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "UNAVAILABLE", "needs a build of torch for CUDA")
    monkeypatch.setattr(triton, "IS_INTERPRETED", is_interpreted)
    device = "meta" if is_interpreted else "cpu"
    x, value = torch.zeros(1, 1, 4, 300, device=device), torch.zeros(1, 1, 4, 257, device=device)
    mask = torch.zeros(4, 4, requires_grad=True, device=device)
    reasons = explain_backends(x, x, value, None, None, attn_mask=mask)["triton"]
    assert reasons == [
        "needs a build of torch for CUDA",
        "runs on the CPU alone while TRITON_INTERPRET is set"
        if is_interpreted
        else "runs on NVIDIA GPUs alone, and query is on cpu",
        "takes heads of at most 256, and query has a width of 300",
        "takes heads of at most 256, and value has a width of 257",
        "has no gradient for attn_mask",
    ]
    assert not any("; " in reason for reason in reasons)
    with pytest.raises(NotImplementedError, match="'triton' cannot run this attention") as refused:
        relative_attention(x, x, value, None, None, attn_mask=mask, backend="triton")
    assert all(reason in str(refused.value) for reason in reasons)


def test_a_mask_that_needs_a_gradient_is_taken_where_none_is_kept() -> None:
    arguments = make(case("mask: float"))
    arguments["attn_mask"].requires_grad_()
    with torch.no_grad():
        assert explain_backends(**arguments)["triton"] == []
        # a reentrant checkpoint comes back with gradients, and must drop the same weights
        assert explain_backends(**arguments, dropout_p=0.1)["triton"] == ["has no gradient for attn_mask"]


def in_a_process(code: str, **environment: str) -> list[str]:
    """The lines that it prints."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WHAT_RUNS = """
import sys, torch, relpos
x = torch.randn(1, 1, 4, 8)
relpos.relative_attention(x, x, x, torch.randn(3, 8), None)
table = relpos.explain_backends(x, x, x, None, None)
print("triton" in sys.modules, table.chosen != "triton")
print(*table["triton"], sep="\\n")
"""


def test_without_triton_everything_else_works_and_the_reason_is_said_in_one_piece(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no library; none at all')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    lines = in_a_process(WHAT_RUNS, PYTHONPATH=path, TRITON_INTERPRET="1")
    assert lines == ["False True", "needs Triton, which does not import: no library, none at all"]


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="triton: torch is built for CUDA, where it is used"
)
def test_a_build_of_torch_for_the_cpu_never_imports_triton() -> None:
    assert in_a_process(WHAT_RUNS, TRITON_INTERPRET="0") == [
        "False True",
        "needs a build of torch for CUDA",
        "runs on NVIDIA GPUs alone, and query is on cpu",
    ]
