"""The backend `merged` on a device `cuda` that is not there: tensors without numbers.

They show shapes, dtypes, devices, the operators' signatures, and what is fetched; and the reasons against it.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from cuda_operators import HALVES, Operators, of_cuda
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from relpos import explain_backends, relative_attention
from relpos.backends.merged import backward, forward, partition, sdpa
from relpos.backends.merged.problem import Problem

aten = torch.ops.aten


class WithoutDevice(TorchFunctionMode):
    """Indexing by slices, copies and `contiguous`: Python's own way to them asks for the device."""

    operators: ClassVar = {
        torch.Tensor.copy_: aten.copy_.default,
        torch.Tensor.contiguous: aten.contiguous.default,
    }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return self.operators.get(func, func)(*args, **(kwargs or {}))
        x, index, *value = args
        meta = torch.empty_strided(x.shape, x.stride(), device="meta")[index]
        view = x.as_strided(meta.shape, meta.stride(), x.storage_offset() + meta.storage_offset())
        for y in value:
            aten.copy_.default(view, y) if isinstance(y, Tensor) else view.fill_(y)
        return view


@contextmanager
def without_numbers() -> Iterator[None]:
    """Tensors have no numbers, and may be on a device that is not there."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), WithoutDevice():
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


class Checked(TorchDispatchMode):
    """Checks what the operators of CUDA are given, and records them and what is fetched from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = {name: check for name, (_, check) in of_cuda(Operators()).items()}
        self.calls: list[str] = []
        self.fetched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.checks:
            self.calls.append(name)
            self.checks[name](*args, **(kwargs or {}))
        self.fetched += name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        return func(*args, **(kwargs or {}))


def fake_problem(
    dtype: torch.dtype,
    widths: tuple[int, int],
    is_causal: bool,
    is_per_head: bool,
    heads: int = 4,
    table_dtype: torch.dtype | None = None,
    length: int = 200,
    tables: bool = True,
) -> Problem:
    def make_one(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    left, right = 3, 2
    rows = (4, left + right + 1) if is_per_head else (left + right + 1,)
    table_dtype = table_dtype or dtype
    return Problem(
        make_one(2, 4, length, widths[0]),
        make_one(2, heads, length, widths[0]),
        make_one(2, heads, length, widths[1]),
        make_one(*rows, widths[0], dtype=table_dtype) if tables else None,
        make_one(*rows, widths[1], dtype=table_dtype) if tables else None,
        *(None, None, None, 0, None, left, right, is_causal, None, 0.0, 0.5),
    )


def run_without_numbers(problem: Problem, needs_lse_gradient: bool) -> Checked:
    """Both passes over tensors without numbers, what they return checked; the operators they called."""
    with Checked() as checked:
        results = forward.attend(problem, True, True)
        grad_lse = torch.empty_like(results[1]) if needs_lse_gradient else None
        saved = backward.Saved(*results, torch.empty_like(results[0]), grad_lse)
        grads = backward.gradients(problem, saved, 31)
    promised = torch.ops.relpos.merged(*problem, True, True)
    of_query = problem.query.shape[:3]
    assert results[0].shape == (*of_query, problem.value.shape[3])
    assert results[0].dtype == problem.query.dtype
    assert results[1].shape == of_query
    assert results[1].dtype == torch.float32
    for found, promise in zip(results, promised, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (promise.shape, promise.dtype, promise.stride())
    for grad, x in zip(grads, problem[:5], strict=True):
        if x is None:
            assert grad.numel() == 0
        else:
            assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
            assert grad.is_contiguous()
    assert {x.device for x in (*results, *grads)} == {torch.device("cuda", 0)}
    return checked


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (3, 7), (33, 20), (8, 1), (256, 250)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_both_passes_meet_what_the_operators_of_cuda_demand(
    dtype: torch.dtype, widths: tuple[int, int], is_causal: bool
) -> None:
    with without_numbers():
        for is_per_head, needs_lse in itertools.product((False, True), (False, True)):
            problem = fake_problem(dtype, widths, is_causal, is_per_head)
            calls = run_without_numbers(problem, needs_lse).calls
            kind = "efficient" if dtype == torch.float32 else "flash"
            backward = "efficient" if needs_lse else kind
            assert set(calls) == {
                f"_scaled_dot_product_{kind}_attention",
                f"_scaled_dot_product_{backward}_attention_backward",
            }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_long_pieces_and_wider_tables_meet_it_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_QUERIES_ON_GPU", 70)
    monkeypatch.setattr(partition, "_SCRATCH_ON_GPU", 1)
    with without_numbers():
        for heads, is_causal in itertools.product((1, 2), (False, True)):
            problem = fake_problem(dtype, (20, 24), is_causal, True, heads, torch.float32)
            assert len(list(partition.pieces(problem))) == 3 * heads
            run_without_numbers(problem, is_causal)
        run_without_numbers(fake_problem(dtype, (20, 24), False, False, tables=False), False)


def test_starts_and_lengths_are_fetched_from_the_device_once() -> None:
    with without_numbers():
        problem = fake_problem(torch.bfloat16, (64, 64), False, False)
        starts = torch.empty(2, dtype=torch.int32, device="cuda")
        lengths = torch.empty(2, dtype=torch.int64, device="cuda")
        for given in (
            {"starts": starts},
            {"key_lengths": lengths},
            {"starts": starts, "key_lengths": lengths},
        ):
            with Checked() as checked:
                fetched = problem._replace(**given).on_host()
                assert fetched.on_host() is fetched
            assert checked.fetched == 1
            for name in ("starts", "key_lengths"):
                x = getattr(fetched, name)
                assert (x is None) == (name not in given)
                assert x is None or (x.device.type, x.dtype, x.shape) == ("cpu", torch.int64, (2,))
        assert problem.on_host() is problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_of_their_own_starts_and_lengths_meet_it_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, lengths = torch.tensor([-3, 90]), torch.tensor([0, 150])
    monkeypatch.setattr(Problem, "on_host", lambda self: self._replace(starts=starts, key_lengths=lengths))
    with without_numbers():
        for is_causal in (False, True):
            # read before they are fetched, these are an error
            unread = torch.empty(2, dtype=torch.int64, device="cuda")
            problem = fake_problem(dtype, (20, 24), is_causal, False)
            problem = problem._replace(starts=unread, key_lengths=unread)
            assert run_without_numbers(problem, False).calls
            assert run_without_numbers(problem, True).calls


def test_starts_and_lengths_are_kept_in_their_places() -> None:
    empty = torch.empty(2, 1, 4, 8)
    starts, lengths = torch.tensor([1, 2]), torch.tensor([3, 4])
    problem = Problem(empty, empty, empty, *[None] * 4, starts, 0, lengths, 0, 0, False, None, 0.0, 1.0)
    assert problem.on_host() is problem
    seen = [(start, length) for _, start, length in partition._sequences(problem)]
    assert seen == [(1, 3), (2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_door_lets_tensors_on_cuda_in(dtype: torch.dtype) -> None:
    # without gradients: autograd asks for a device's streams, and ends the process where there is no device
    with without_numbers(), torch.no_grad():
        query = torch.empty(2, 4, 512, 20, dtype=dtype, device="cuda")
        table = torch.empty(5, 20, dtype=dtype, device="cuda")
        lengths = torch.empty(2, dtype=torch.int64, device="cuda")
        out, lse = relative_attention(
            query, query, query, table, table, key_lengths=lengths, return_lse=True, backend="merged"
        )
        assert (out.shape, out.dtype, out.device.type) == (query.shape, dtype, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == (query.shape[:3], torch.float32, "cuda")
        problem = Problem(query, query, query, table, *[None] * 4, 0, lengths, 2, 2, False, None, 0.0, 0.5)
        results = torch.ops.relpos.merged(*problem, True, True)
        grads = torch.ops.relpos.merged_backward(*problem, True, True, *results, out, lse, 31)
        for grad, x in zip(grads, problem[:4], strict=False):
            assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)
        assert grads[4].numel() == 0


@pytest.mark.parametrize("name", ["relpos::merged", "relpos::merged_backward"])
def test_operators_are_there_for_cuda_and_stay_out_of_its_graphs(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    operator = getattr(torch.ops.relpos, name.removeprefix("relpos::")).default
    assert torch.Tag.cudagraph_unsafe in operator.tags


def test_a_compiled_function_can_ask_for_the_reasons() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def count(x: Tensor) -> Tensor:
        device = torch.device("cuda", 0)
        return x + len(sdpa.reasons_against(device, torch.float16, 300))

    assert count(torch.zeros(())).item() == 1


def reasons_on_cuda(dtype: torch.dtype, width: int = 64, **options: Any) -> list[str]:
    with without_numbers():
        x = torch.empty(1, 2, 300, width, dtype=dtype, device="cuda")
        made = {name: make_one() for name, make_one in options.items()}
        return explain_backends(x, x, x, None, None, **made)["merged"]


def test_what_it_cannot_do_on_cuda_is_said_reason_by_reason() -> None:
    assert reasons_on_cuda(torch.float32, 300) == []
    assert reasons_on_cuda(torch.bfloat16, 256) == []
    assert reasons_on_cuda(torch.float64) == ["has no fused kernel for float64 on CUDA"]
    assert reasons_on_cuda(torch.float16, 257) == [
        "has no fused kernel for 16 bits on CUDA with heads wider than 256"
    ]
    reasons = reasons_on_cuda(
        torch.float32, attn_mask=lambda: torch.ones(1, 1, 1, 300, dtype=torch.bool, device="cuda")
    )
    assert reasons == ["takes no attn_mask on CUDA: give key_lengths where it hides keys at the end"]
    with without_numbers():
        x = torch.empty(1, 2, 300, 64, device="cuda")
        table = torch.empty(3, 64, dtype=torch.float64, device="cuda")
        assert explain_backends(x, x, x, table, None)["merged"] == ["has no fused kernel for float64 on CUDA"]


def test_builds_and_gpus_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        major, minor = 7, 5

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Old())
    monkeypatch.setattr(sdpa, "_HAS_FLASH", False)
    assert sdpa.reasons_against(device, torch.float16, 64) == [
        "has no fused kernel for 16 bits on CUDA in this build of torch",
        "has no fused kernel for 16 bits on GPUs of a compute capability below 8.0",
    ]
    assert sdpa.reasons_against(device, torch.float32, 64) == []
    Old.major = 8
    monkeypatch.setattr(sdpa, "_HAS_FLASH", True)
    assert sdpa.reasons_against(device, torch.float16, 64) == []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert sdpa.reasons_against(device, torch.float32, 64) == [
        "takes NVIDIA's GPUs alone: ROCm lays out what the kernels return in another way"
    ]


def test_a_piece_on_a_gpu_is_as_large_as_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        total_memory = 16 << 30

    with without_numbers():
        problem = fake_problem(torch.bfloat16, (64, 64), False, False)
        room = partition.room(problem.query.device)
        assert room == (partition._QUERIES_ON_GPU, partition._SCRATCH_ON_GPU, 1)
        assert len(list(partition.pieces(problem))) == 1
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device())
        assert partition.room(problem.query.device) == (partition._QUERIES_ON_GPU, 64 << 20, 1)
        # less than one of the four heads wants
        Device.total_memory = 1 << 20
        assert len(list(partition.pieces(problem))) == 4


def test_sizes_on_cuda_have_a_threshold_of_their_own() -> None:
    with without_numbers():
        later = {}
        for device, length in itertools.product(("cpu", "cuda"), (1024, 2048)):
            x = torch.empty(1, 8, length, 64, device=device)
            later[device, length] = explain_backends(x, x, x, None, None).later.get("merged")
    assert later == {
        ("cpu", 1024): None,
        ("cpu", 2048): None,
        ("cuda", 1024): "is slower with fewer than 33,554,432 pairs in all heads",
        ("cuda", 2048): None,
    }
