"""A program for test_triton_traced.py: what torch makes of the Triton operators when it traces them.

It pretends that torch is built for CUDA and that Triton has a GPU: tensors are fake, and nothing is launched.
Prints how many kernels are in the graphs of each case, and what any batch and length must hold to; fails
where torch takes an input for written to.
"""

import json

import torch
import triton
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton.backends.compiler import GPUTarget


class _Driver:
    """As much of a driver as finds what a kernel writes to."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


torch.version.cuda = torch.version.cuda or "13.0"
triton.runtime.driver.set_active(_Driver())
import relpos  # noqa: E402, F401

LENGTH, HEADS, LABELS = 100, 4, 33


def _case(name: str) -> tuple[list[torch.Tensor], tuple]:
    """Tensors that attention is given, and its other arguments with places for the last of them."""
    query = torch.empty(2, HEADS, LENGTH, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.empty(LABELS, 64, device="cuda")
    integers = torch.empty(2, device="cuda", dtype=torch.int64)
    pairs = (2, 1, LENGTH, LENGTH)
    others = {
        "distances": (None, None, None, None),
        "starts and lengths": (None, None, integers, integers.clone()),
        "labels": (torch.empty(pairs, device="cuda", dtype=torch.int8), None, None, None),
        "bool mask": (None, torch.empty(pairs, device="cuda", dtype=torch.bool), None, None),
        "float mask": (None, torch.empty(pairs, device="cuda"), None, None),
        "dropout": (None, None, None, None),
    }[name]
    seed = torch.empty(1, device="cuda", dtype=torch.int64) if name == "dropout" else None
    left = 0 if name == "labels" else 16
    return [query, query.clone(), query.clone(), table, table.clone()], (
        *others,
        left,
        LABELS - 1 - left,
        seed,
        0.1 if name == "dropout" else 0.0,
    )


def _count(name: str) -> list[int]:
    tensors, (relations, mask, starts, lengths, left, right, seed, dropout_p) = _case(name)
    given = [x for x in (relations, mask, starts, lengths, seed) if x is not None]

    def arguments(flat: tuple[torch.Tensor, ...]) -> tuple:
        rest = iter(flat[5:])
        relations_, mask_, starts_, lengths_, seed_ = (
            None if x is None else next(rest) for x in (relations, mask, starts, lengths, seed)
        )
        return (
            *flat[:5],
            *(relations_, mask_, starts_, 0, lengths_, left, right, False, seed_, dropout_p, 0.125, True),
        )

    def forward(*flat: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.ops.relpos.triton(*arguments(flat)))

    results = forward(*tensors, *given)

    def backward(*flat: torch.Tensor) -> list[torch.Tensor]:
        saved, flat = flat[:4], flat[4:]
        return list(torch.ops.relpos.triton_backward(*arguments(flat), *saved, saved[0], saved[1], 31))

    graphs = [
        aot_export_joint_simple(forward, (*tensors, *given), trace_joint=False),
        aot_export_joint_simple(backward, (*results, *tensors, *given), trace_joint=False),
    ]
    wrapped = torch.ops.higher_order.triton_kernel_wrapper_functional
    return [sum(node.target is wrapped for node in graph.graph.nodes) for graph in graphs]


def _guards() -> list[str]:
    """What torch finds that a graph of any batch and length must hold to."""
    shapes = ShapeEnv()
    dynamic = StatelessSymbolicContext(
        [DimDynamic.DYNAMIC if i in (0, 2) else DimDynamic.STATIC for i in range(4)]
    )
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:
        real = torch.empty(2, HEADS, LENGTH, 64, device="meta", dtype=torch.bfloat16)
        query = mode.from_tensor(real, symbolic_context=dynamic)
        table = torch.empty(LABELS, 64, device="meta")
        given = (
            query,
            query,
            query,
            table,
            table,
            *[None] * 3,
            0,
            None,
            16,
            16,
            True,
            None,
            0.0,
            0.125,
            True,
        )
        results = torch.ops.relpos.triton(*given)
        torch.ops.relpos.triton_backward(*given, *results, results[0], results[1], 31)
    return [str(guard.expr) for guard in shapes.guards]


if __name__ == "__main__":
    names = ("distances", "starts and lengths", "labels", "bool mask", "float mask", "dropout")
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts = {name: _count(name) for name in names}
    print(json.dumps({"kernels": counts, "guards": _guards()}))
