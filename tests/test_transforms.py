"""Functions of attention: torch.func's transforms, and derivatives of derivatives."""

import pytest
import torch
from torch import Tensor

from conformance.cases import TENSORS, case, make
from relpos import relative_attention

CASES = (
    "left over right",
    "k = 0",
    "per head",
    "tables: keys",
    "tables: values",
    "tables: neither",
    "grouped heads",
    "one sentence is empty",
    "no key exists",
    "mask: float inf",
    "mask: empty rows",
    "a start for each sequence, causal",
    "mask, lengths and causal",
)
by_case = pytest.mark.parametrize("name", CASES)
# torch's own rules of forward differentiation are made with what it has deprecated
differentiates_forward = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def function_of(name: str, backend: str | None = None):
    """Attention as a function of the tensors of a case alone, and those tensors."""
    arguments = make(case(name))
    names = [x for x in TENSORS if arguments[x] is not None]
    leaves = tuple(arguments[x].detach().clone() for x in names)
    rest = {x: value for x, value in arguments.items() if x not in names}

    def attend(*tensors: Tensor) -> Tensor:
        return relative_attention(**dict(zip(names, tensors, strict=True)), **rest, backend=backend)

    return attend, leaves


def gradients(attend, leaves: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor, ...]:
    copies = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(attend(*copies), copies, grad_out)


@by_case
def test_vjp_gives_the_gradients_of_autograd(name: str) -> None:
    attend, leaves = function_of(name)
    out, pull = torch.func.vjp(attend, *leaves)
    grad_out = torch.randn_like(out)
    torch.testing.assert_close(pull(grad_out), gradients(attend, leaves, grad_out))


@differentiates_forward
@by_case
def test_jvp_is_the_transpose_of_the_gradient(name: str) -> None:
    attend, leaves = function_of(name)
    tangents = tuple(torch.randn_like(x) for x in leaves)
    out, pushed = torch.func.jvp(attend, leaves, tangents)
    grad_out = torch.randn_like(out)
    pulled = gradients(attend, leaves, grad_out)
    total = sum((x * y).sum() for x, y in zip(pulled, tangents, strict=True))
    torch.testing.assert_close((grad_out * pushed).sum(), total)


@by_case
def test_vmap_over_all_tensors_is_one_call_for_each(name: str) -> None:
    attend, leaves = function_of(name)
    stacked = [torch.stack((x, 0.5 * x, -x)) for x in leaves]
    out = torch.func.vmap(attend)(*stacked)
    each = [attend(*(x[i] for x in stacked)) for i in range(3)]
    torch.testing.assert_close(out, torch.stack(each))


@by_case
def test_gradients_for_each_example_are_those_of_one_call_each(name: str) -> None:
    attend, leaves = function_of(name)
    # three examples under one set of tables
    stacked = [torch.stack((x, 0.5 * x, -x)) for x in leaves[:3]]
    grad = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=tuple(range(len(leaves))))
    found = torch.func.vmap(grad, in_dims=(0, 0, 0) + (None,) * len(leaves[3:]))(*stacked, *leaves[3:])
    for i in range(3):
        wanted = grad(*(x[i] for x in stacked), *leaves[3:])
        torch.testing.assert_close([x[i] for x in found], list(wanted))


MASKS = {
    "key lengths": ("key_lengths", torch.tensor([[5, 2], [0, 3], [1, 4]])),
    "bool masks": ("attn_mask", torch.rand(3, 1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6),
    "float masks": ("attn_mask", torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))),
    "starts": ("query_start", torch.tensor([[0, 2], [0, 3], [1, -4]])),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tables", ["both", "keys", "values", "neither"])
@pytest.mark.parametrize("kind", MASKS)
def test_vmap_over_masks_alone_is_one_call_for_each(kind: str, tables: str, is_causal: bool) -> None:
    argument, values = MASKS[kind]
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    rel_k = torch.randn(5, 4) if tables in ("both", "keys") else None
    rel_v = torch.randn(5, 4) if tables in ("both", "values") else None

    def attend(x: Tensor) -> Tensor:
        return relative_attention(query, key, value, rel_k, rel_v, is_causal=is_causal, **{argument: x})

    found = torch.func.vmap(attend)(values)
    torch.testing.assert_close(found, torch.stack([attend(x) for x in values]))


@by_case
def test_gradients_of_gradients_are_right(name: str) -> None:
    attend, leaves = function_of(name, "dense")
    assert torch.autograd.gradgradcheck(attend, tuple(x.requires_grad_() for x in leaves), fast_mode=True)


@differentiates_forward
def test_hessian_of_a_table_is_symmetric() -> None:
    attend, leaves = function_of("tables: keys")
    *others, rel_k = leaves
    hessian = torch.func.hessian(lambda table: attend(*others, table).square().sum())(rel_k)
    as_matrix = hessian.flatten(2).flatten(0, 1)
    assert as_matrix.abs().max() > 0
    torch.testing.assert_close(as_matrix, as_matrix.mT)
