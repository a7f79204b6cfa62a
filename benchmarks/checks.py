"""Checks of a form against the reference, before it is timed."""

from torch import Tensor
from torch.autograd import grad

from forms import Setting, Tensors, given
from relpos import relative_attention

NAMES = ("out", "grad of query", "grad of key", "grad of value", "grad of rel_k", "grad of rel_v")
# highest norm of the error over the norm of the truth; a missing or wrong term errs by a tenth or more
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
SAMPLED_QUERIES = 8


def check(name: str, setting: Setting, tensors: Tensors, found: tuple[Tensor, ...]) -> None:
    """Compare results at full size, for a few queries of two heads.

    The output and the gradient of a query depend on no other query; the other gradients are sums over all
    queries, and are checked to be finite only.

    Raises:
        ValueError: a result is wrong.
    """
    start = setting.length // 2
    rows, heads = slice(start, start + SAMPLED_QUERIES), [0, setting.heads - 1]
    query, key, value, rel_k, rel_v, grad_out = tensors[:6]
    sample = Tensors(
        query=query[-1:, heads, rows].detach().requires_grad_(setting.has_backward),
        key=key[-1:, heads].detach(),
        value=value[-1:, heads].detach(),
        rel_k=rel_k.detach(),
        rel_v=rel_v.detach(),
        grad_out=grad_out[-1:, heads, rows],
        key_lengths=None,
    )
    for what, x in zip(NAMES, found, strict=False):
        if not x.isfinite().all():
            raise ValueError(f"{name} computes something else: {what} is not finite at full size")
    few = tuple(x[-1:, heads, rows] for x in found[:2])
    _compare(name, setting, few, _truth(name, setting, sample, query_start=start, num_wanted=1))


def _truth(
    name: str, setting: Setting, tensors: Tensors, *, query_start: int = 0, num_wanted: int | None = None
) -> tuple[Tensor, ...]:
    """Results of the reference in float64, with the gradients of the first `num_wanted` tensors."""
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in given(name, tensors)]
    out = relative_attention(
        *inputs,
        *[None] * (5 - len(inputs)),
        max_distance=setting.max_distance if len(inputs) > 3 else None,
        query_start=query_start,
        is_causal=setting.is_causal,
        backend="reference",
    )
    if not setting.has_backward:
        return (out,)
    return out, *grad(out, inputs[:num_wanted], tensors.grad_out.double())


def _compare(name: str, setting: Setting, found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    most = TOLERANCE[setting.dtype]
    for what, x, true in zip(NAMES, found, truth, strict=False):
        error = ((x.double() - true).norm() / true.norm()).item()
        # NaN fails this too
        if not error <= most:
            raise ValueError(
                f"{name} computes something else: {what} is off by {error:.2g} of its norm, above {most:g}"
            )
    if len(found) != len(truth):
        raise ValueError(f"{name} must return {len(truth)} tensors; got {len(found)}")
