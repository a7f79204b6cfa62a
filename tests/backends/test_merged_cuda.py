"""The numbers of the backend `merged` on the way that they take on CUDA, proven where there is no GPU.

Tensors on the CPU are given to the kernels of CUDA, whose operators `cuda_operators` computes.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_operators import HALVES, Operators, is_aligned, of_cuda
from torch import Tensor

from conformance.cases import CASES, Case, attend, case, detached, make, outcome, plain_attention
from conformance.test_backends import LOW_PRECISION_CASES
from relpos import relative_attention
from relpos.backends.merged import far, sdpa

# what merged takes on CUDA: no masks, no labels
TAKEN = [x for x in CASES if x.mask is None and x.relations is None]
KERNELS_OF_CUDA = {
    dtype: sdpa.KERNELS["cuda", dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


@pytest.fixture
def as_on_cuda(
    monkeypatch: pytest.MonkeyPatch, nan_in_fresh_memory: None
) -> Iterator[Callable[..., Operators]]:
    """Have tensors on the CPU take the way of those on CUDA, whose operators are stood in for."""
    libraries: list[torch.library.Library] = []

    def begin(operators: Operators, kernels: dict[torch.dtype, sdpa.Fused]) -> Operators:
        library = torch.library.Library("aten", "IMPL")
        libraries.append(library)
        for name, (compute, _) in of_cuda(operators).items():
            library.impl(name, compute, "CPU")
        for dtype, kernel in kernels.items():
            monkeypatch.setitem(sdpa.KERNELS, ("cpu", dtype), kernel)
        return operators

    yield begin
    for library in libraries:
        library._destroy()


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name].double(),
            x,
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_each_dtype_has_the_kernel_that_takes_it() -> None:
    cuda = {dtype: x for (device, dtype), x in sdpa.KERNELS.items() if device == "cuda"}
    assert cuda == {
        torch.float32: sdpa.EFFICIENT,
        torch.bfloat16: sdpa.FLASH,
        torch.float16: sdpa.FLASH,
    }


@pytest.mark.parametrize("kernel", ["FLASH", "EFFICIENT"])
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_every_case_equals_the_reference_in_double_precision(
    case: Case, kernel: str, as_on_cuda: Callable[..., Operators]
) -> None:
    # neither kernel takes float64 on a GPU; here it shows that what stands around them is exact
    as_on_cuda(Operators((torch.float64,)), {torch.float64: getattr(sdpa, kernel)})
    arguments = make(case)
    found = outcome(*attend("merged", arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    assert_same(found, truth, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "name", [x for x in LOW_PRECISION_CASES if x not in ("mask: float", "relations for pairs")]
)
@pytest.mark.parametrize("needs_lse", [False, True])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(
    name: str, dtype: torch.dtype, needs_lse: bool, as_on_cuda: Callable[..., Operators]
) -> None:
    operators = as_on_cuda(Operators(), KERNELS_OF_CUDA)
    if name == "grouped heads, low precision":
        given = make(Case(name, heads=6, key_heads=2, num_queries=17), dtype)
    else:
        given = make(case(name), dtype)
    outcomes = []
    for run, wanted in (
        (lambda x: attend("merged", x), None),
        (plain_attention, None),
        (lambda x: attend("reference", x), torch.float64),
    ):
        arguments = detached(given, wanted)
        out, lse = run(arguments)
        # whether lse has a gradient decides which kernel goes backward in 16 bits
        outcomes.append(outcome(out, lse if needs_lse else lse.detach() + 0 * out.sum(), arguments))
    found, plain, truth = outcomes
    assert found["out"].dtype == dtype
    for part, x in truth.items():
        error, plain_error = ((y[part].double() - x).abs().max().item() for y in (found, plain))
        rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * truth["lse"].abs().max().item()
        rounding *= x.abs().max().item()
        assert error <= 2 * plain_error + rounding, f"{part}: {error} against {plain_error}"
    if name != "length 17":  # of which no pair is far
        is_flash = dtype != torch.float32
        assert ("flash" in operators.calls) == is_flash
        assert ("flash_backward" in operators.calls) == (is_flash and not needs_lse)
        assert ("efficient_backward" in operators.calls) == (not is_flash or needs_lse)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_tensors_that_begin_anywhere_are_laid_out_for_the_kernels(
    dtype: torch.dtype, as_on_cuda: Callable[..., Operators]
) -> None:
    operators = as_on_cuda(Operators(), KERNELS_OF_CUDA)
    # widths that need no zeros, out of one projection that begins and steps where no load may
    packed = torch.randn(2, 40, 3 * 2 * 8 + 1, dtype=torch.float64).to(dtype)[..., 1:]
    query, key, value = packed.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    one = torch.randn(1, 1, 1, 9, dtype=torch.float64).to(dtype)[..., 1:]
    table = torch.randn(3, 8, dtype=torch.float64).to(dtype)
    for tensors in ((query, key, value), (one, one, one)):
        leaves = [x.detach().requires_grad_() for x in tensors]
        truth_leaves = [x.detach().double().requires_grad_() for x in tensors]
        out = relative_attention(*leaves, table, table, backend="merged")
        truth = relative_attention(*truth_leaves, table.double(), table.double(), backend="reference")
        torch.testing.assert_close(out.double(), truth, atol=0.02, rtol=0.02)
        grads = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(truth.sum(), truth_leaves)
        for found, x in zip(*grads, strict=True):
            torch.testing.assert_close(found.double(), x, atol=0.06, rtol=0.06)
    assert operators.calls


@pytest.mark.parametrize("odd", [((31, 17, 9, 1), 0), ((16, 16, 8, 1), 3)], ids=["strides", "offset"])
def test_what_torch_calls_contiguous_is_laid_out_too(odd: tuple[tuple[int, ...], int]) -> None:
    x = torch.randn(100).as_strided((1, 1, 1, 8), *odd)
    assert x.is_contiguous()
    assert not is_aligned(x)
    assert is_aligned(sdpa._aligned(x))
    assert torch.equal(sdpa._aligned(x), x)
    y = torch.randn(2, 2, 5, 8)
    assert sdpa._aligned(y) is y


def test_a_gradient_of_lse_beyond_half_precision_stays_finite(as_on_cuda: Callable[..., Operators]) -> None:
    operators = as_on_cuda(Operators(), KERNELS_OF_CUDA)
    arguments = detached(make(case("length 63")), torch.float16)
    truth_arguments = detached(arguments, torch.float64)
    found, truth = (
        torch.autograd.grad(attend(backend, x)[1].sum() * 7e4, [x["key"]])[0]
        for backend, x in (("merged", arguments), ("reference", truth_arguments))
    )
    near = truth.abs() < torch.finfo(torch.float16).max / 2
    torch.testing.assert_close(found[near].double() / 7e4, truth[near] / 7e4, atol=0.05, rtol=0.02)
    assert "efficient_backward" in operators.calls
    assert "flash_backward" not in operators.calls


def test_causal_parts_count_the_pairs_that_a_kernel_counts(as_on_cuda: Callable[..., Operators]) -> None:
    as_on_cuda(Operators((torch.float64,)), {torch.float64: sdpa.FLASH})
    for n, m, offset in itertools.product((1, 5, 9), (1, 4, 12), range(-6, 14)):
        query, key = (
            torch.randn(1, 1, n, 8, dtype=torch.float64),
            torch.randn(1, 1, m, 8, dtype=torch.float64),
        )
        i, j = torch.arange(n)[:, None], torch.arange(m)
        for parts, counts in (
            (far.until(n, m, offset), j <= i + offset),
            (far.since(n, m, offset), j >= i + offset),
        ):
            lse = query.new_full((1, 1, n), -math.inf)
            for part in parts:
                _, part_lse = far.attend(part, (query, key, key), 0.5)
                lse[:, :, part.queries] = torch.logaddexp(lse[:, :, part.queries], part_lse)
            logits = (0.5 * query @ key.mT).masked_fill(~counts, -math.inf)
            torch.testing.assert_close(lse, torch.logsumexp(logits, -1))
