"""The backend `triton` where numbers, widths, settings and devices are at their limits; interpreted."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from conformance.cases import Case, attend, detached, make, outcome
from relpos import explain_backends, relation_attention, relative_attention
from relpos.backends.merged import sdpa
from relpos.backends.triton import backend as triton

if triton.UNAVAILABLE is not None or not triton.IS_INTERPRETED:
    pytest.skip(f"triton: {triton.UNAVAILABLE or 'is not interpreted'}", allow_module_level=True)

from relpos.backends.triton import call, operators

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("by", ["distance", "label"])
def test_more_keys_of_one_label_than_float16_can_count_sum_up(by: str) -> None:
    num_keys = 70_000
    query = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    key, value = (x.expand(1, 1, num_keys, 16) for x in (query, torch.ones_like(query)))
    table = torch.ones(1, 16, dtype=torch.float16)
    if by == "distance":
        out = relative_attention(query, key, value, table, table, query_start=0, backend="triton")
    else:
        labels = torch.zeros((), dtype=torch.int8)
        out = relation_attention(query, key, value, labels, table, table, backend="triton")
    torch.testing.assert_close(out, torch.full_like(out, 2.0), atol=0, rtol=2**-9)


def test_torch_is_asked_how_exact_products_are_by_either_of_its_settings() -> None:
    matmul = torch.backends.cuda.matmul
    arguments = make(Case("any"), torch.bfloat16)
    before = matmul.fp32_precision
    try:
        for told, wanted in (("tf32", "tf32"), ("ieee", "ieee")):
            matmul.fp32_precision = told
            assert call.precision() == wanted
            # whatever it says, it must not end a call
            assert attend("triton", arguments)[0].isfinite().all()
    finally:
        matmul.fp32_precision = before


def test_wide_heads_are_refused_with_the_limit() -> None:
    for dtype, limit in ((torch.float32, 256), (torch.float64, 128)):
        for width, fits in ((limit, True), (limit + 1, False)):
            x = torch.zeros(1, 1, 2, width, dtype=dtype)
            reasons = explain_backends(x, x, x, None, None)["triton"]
            assert (not reasons) == fits
            assert fits or all(f"at most {limit}" in reason for reason in reasons)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(x: torch.Tensor) -> Iterator[None]:
        entered.append(x.device)
        yield

    monkeypatch.setattr(operators, "device_of", device)
    arguments = make(Case("any"))
    outcome(*attend("triton", arguments), arguments)
    assert entered == [torch.device("cpu")] * 2
    monkeypatch.undo()
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    held = call.device_of(on_gpu)  # type: ignore[arg-type]
    assert isinstance(held, torch.cuda.device)
    assert held.idx == 1
    assert not isinstance(call.device_of(torch.zeros(1)), torch.cuda.device)


@pytest.mark.parametrize(
    ("capability", "width", "fits"),
    [
        ((8, 6), 200, False),
        ((8, 6), 192, True),
        ((8, 6), 256, True),
        ((9, 0), 200, True),
        ((12, 0), 224, False),
    ],
)
def test_merged_leaves_what_flash_attention_cannot_go_back_through(
    capability: tuple[int, int], width: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, name="a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(sdpa, "_HAS_FLASH", True)
    reasons = sdpa.reasons_against(torch.device("cuda"), torch.bfloat16, width)
    assert (not reasons) == fits


def test_values_of_no_width_still_have_a_log_of_the_sum_and_its_gradients() -> None:
    query = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    value, table = query.new_zeros(1, 2, 5, 0), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    grads = []
    for name in ("triton", "reference"):
        out, lse = relative_attention(query, query, value, table, None, return_lse=True, backend=name)
        assert out.shape == (1, 2, 5, 0)
        grads.append((lse, *torch.autograd.grad(lse.sum(), [query, table])))
    for found, truth in zip(*grads, strict=True):
        torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-10)


# numpy's, by which the interpreter looks for the largest logit
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("spoilt", "mask"), [("query", None), ("key", "bool"), ("key", "float"), ("value", "bool")]
)
def test_what_is_no_number_stays_none_wherever_it_reaches(spoilt: str, mask: str | None) -> None:
    arguments = detached(make(Case("any", num_queries=40, mask=mask)))
    with torch.no_grad():
        arguments[spoilt][0, 0, 3] = math.nan
    found, truth = (outcome(*attend(name, arguments), arguments) for name in ("triton", "reference"))
    # a mask that hides it hides it from the reference alone
    for name, x in truth.items():
        assert found[name][x.isnan()].isnan().all(), name


def test_float64_takes_no_scale_that_kernels_cannot_be_given() -> None:
    x = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    for scale, fits in ((1e39, False), (-1e-50, False), (1e20, True), (0.0, True), (-2.0, True)):
        reasons = explain_backends(x, x, x, None, None, scale=scale)["triton"]
        assert (not reasons) == fits


def test_a_mask_of_float64_beside_bfloat16_is_read_in_float32() -> None:
    arguments = make(Case("any", mask="float"), torch.bfloat16)
    arguments["attn_mask"] = arguments["attn_mask"].double()
    found, truth = (attend(name, arguments)[0] for name in ("triton", "reference"))
    torch.testing.assert_close(found, truth, atol=0.03, rtol=0.03)
