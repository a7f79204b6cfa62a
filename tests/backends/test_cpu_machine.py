"""The kernel on every instruction set, in little memory, and at sizes that a small integer does not count."""

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relpos import relation_attention, relative_attention
from relpos.backends.cpu import backend as cpu

pytestmark = pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}")


def test_strides_beyond_four_billion_bytes_are_followed() -> None:
    far = 2**31 + 64
    # pages that nobody touches cost nothing, where the system is told to set none aside
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, 2 * far + 1024, flags=flags), dtype=torch.float16)
    rows = memory.as_strided((1, 1, 2, 4), (0, 0, far, 1))
    rows.copy_(torch.randn(1, 1, 2, 4))
    mask = memory.view(torch.bool).as_strided((2, 2), (far, 1), 64)
    mask.copy_(torch.tensor([[True, False], [True, True]]))
    labels = memory.view(torch.int16).as_strided((2, 2), (far, 1), 128)
    labels.copy_(torch.tensor([[0, 1], [2, -1]]))
    table = torch.randn(3, 4)
    found, truth = (
        relation_attention(rows, rows, rows, labels, table, table, attn_mask=mask, backend=backend)
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, truth)


@pytest.mark.slow
def test_more_pairs_than_an_int32_counts() -> None:
    n = 47_000
    assert n * n > 2**31
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 1, requires_grad=True) for _ in range(3))
    rel_k, rel_v = (torch.randn(9, 1, requires_grad=True) for _ in range(2))
    # a mask of all pairs in the memory of one line: pair (i, j) reads i + j
    line = torch.arange(2 * n) % 97 != 0
    mask = line.as_strided((n, n), (1, 1))
    out, lse = relative_attention(
        query, key, value, rel_k, rel_v, attn_mask=mask, return_lse=True, backend="cpu"
    )
    grads = torch.autograd.grad(out.sum(), (query, key, value, rel_k, rel_v))
    # the weights of each query sum to 1, and so do the gradients of the values and of their table
    torch.testing.assert_close(
        grads[2].double().sum(), torch.tensor(n, dtype=torch.float64), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        grads[4].double().sum(), torch.tensor(n, dtype=torch.float64), rtol=1e-5, atol=0
    )
    last = slice(n - 64, n)
    given = {"query_start": n - 64, "return_lse": True, "attn_mask": mask[last]}
    truth = relative_attention(query[:, :, last], key, value, rel_k, rel_v, **given, backend="dense")
    torch.testing.assert_close((out[:, :, last], lse[:, :, last]), truth, rtol=1e-4, atol=1e-5)


LINEAR = """
import resource, torch
from relpos import relative_attention
torch.set_num_threads(1)
def run(n):
    tensors = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
    tensors += [torch.randn(33, 8, requires_grad=True) for _ in range(2)]
    out = relative_attention(*tensors, attn_mask=torch.ones(n, dtype=torch.bool), backend="cpu")
    torch.autograd.grad(out.sum(), tensors)
run(128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count resident memory in other units")
@pytest.mark.skipif("RELPOS_CPU_KERNEL" in os.environ, reason="what finds faults keeps memory of its own")
def test_the_kernel_takes_no_memory_for_pairs() -> None:
    grown = int(in_a_process(LINEAR).stdout)  # KiB
    # a byte for each pair would be 65,536 KiB; inputs, outputs and gradients are 2,048 KiB
    assert grown < 8_192


EVERY_CASE = """
import json, torch
from conformance.cases import CASES, Case, attend, detached, make, outcome
from relpos.backends.cpu import backend as cpu
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
start = {"query_start": 99, "left": 70, "right": 40, "key_lengths": (300, 211)}
more = (
    Case("long", num_queries=150, num_keys=300, d_k=20, d_v=33, **start),
    Case("few", num_queries=3, num_keys=2100, query_start=2097, d_k=17, d_v=8, is_causal=True),
    Case("labels", num_queries=70, num_keys=130, relations="batch", d_k=5, d_v=40, mask="bool"),
)
tolerances = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.03}
wrong = []
for case in (*CASES, *more):
    given = make(case)
    truth = outcome(*attend("reference", given), given)
    for dtype, tolerance in tolerances.items():
        if case.mask == "float min" and dtype != torch.float64:
            continue  # the smallest number of one dtype is not that of another
        arguments = detached(given, dtype)
        found = outcome(*attend("cpu", arguments), arguments)
        for name, x in truth.items():
            finite = x[x.isfinite()].abs()
            size = 1 + (finite.max().item() if finite.numel() else 0)
            if not torch.isclose(found[name].double(), x, atol=tolerance * size, rtol=0).all():
                wrong.append(f"{case}, {dtype}, {name}")
print(json.dumps({"set": cpu.instruction_set(), "wrong": wrong}))
"""


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("compiled", [False, True])
def test_an_output_without_memory_is_told_by_its_size(compiled: bool) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return relative_attention(x, x, x, None, None, backend="cpu")

    x = torch.zeros(1, 1, 1, 64).expand(2**18, 2**10, 2**10, 64)
    attend = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
    with pytest.raises(
        RuntimeError,
        match=r'^relpos: backend "cpu" ran out of memory\. A tensor \[262144, 1024, 1024, 64\] needs '
        r"70368744177664 bytes, and there are not as many: give fewer queries, heads or sequences at a time",
    ):
        attend(x)


def test_gradients_without_memory_are_told_by_their_size() -> None:
    x = torch.zeros(1, 1, 1, 64).expand(2**18, 2**10, 2**10, 64)
    lse = torch.zeros(1, 1, 1).expand(2**18, 2**10, 2**10)
    rest = (None, None, None, None, None, 0, None, 0, 0, False, None, 0.0, 1.0)
    with pytest.raises(RuntimeError, match=r"ran out of memory\. A tensor \[262144, 1024, 1024, 64\] needs"):
        torch.ops.relpos.cpu_backward(x, x, x, *rest, x, lse, x, None, 1)


def test_instructions_of_an_unknown_name_are_refused_at_the_first_use() -> None:
    code = """
import torch
from relpos import relative_attention
for _ in range(2):
    try:
        relative_attention(*torch.randn(3, 1, 1, 2, 4), None, None)
    except RuntimeError as error:
        print(error)
"""
    told = (
        "RELPOS_CPU must be one of avx512, avx2, baseline; got 'avx3'. "
        "Unset it for the widest instructions of this processor."
    )
    assert in_a_process(code, RELPOS_CPU="avx3").stdout.splitlines() == [told, told]
    assert in_a_process(code, RELPOS_CPU="avx2").stdout == ""


@pytest.mark.parametrize("wanted", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_gives_the_reference_in_every_case(wanted: str) -> None:
    has = {"AVX512": ("avx2", "avx512"), "AVX2": ("avx2",)}.get(torch.backends.cpu.get_cpu_capability(), ())
    if wanted not in ("baseline", *has):
        pytest.skip(f"this processor has no {wanted}")
    done = json.loads(in_a_process(EVERY_CASE, RELPOS_CPU=wanted).stdout)
    assert done == {"set": wanted, "wrong": []}


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")
def test_a_compiler_without_shuffles_gives_the_reference_in_every_case(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CXXFLAGS": "-DRELPOS_NO_SHUFFLES -O1", "RELPOS_BUILD_KERNEL": "1"}
    where = ["--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "objects")]
    command = [sys.executable, "setup.py", "-q", "build_ext", *where]
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=300)
    done = in_a_process(
        EVERY_CASE, RELPOS_CPU_KERNEL=str(tmp_path / "relpos/_cpu_kernel.so"), RELPOS_CPU="avx2"
    )
    assert json.loads(done.stdout)["wrong"] == []


def test_lengths_and_starts_that_a_compiled_call_cannot_check_reach_no_other_memory() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 70, 8) for _ in range(3)]
    table = torch.randn(5, 8)

    def outcome(starts: tuple[int, int], lengths: tuple[int, int]) -> list[torch.Tensor]:
        numbers = (torch.tensor(starts), 0, torch.tensor(lengths))
        problem = (*tensors, table, table, None, None, *numbers, 2, 2, True, None, 0.0, 0.5)
        out, lse = torch.ops.relpos.cpu(*problem)
        grads = torch.ops.relpos.cpu_backward(*problem, out, lse, torch.ones_like(out), None, 31)
        return [out, lse, *grads]

    for wrong, right in (
        (((0, 0), (71, 2**40)), ((0, 0), (70, 70))),
        (((0, 0), (-1, -(2**63))), ((0, 0), (0, 0))),
        (((2**63 - 1, -(2**63)), (70, 70)), ((2**62, -(2**62)), (70, 70))),
    ):
        assert all(torch.equal(x, y) for x, y in zip(outcome(*wrong), outcome(*right), strict=True))
