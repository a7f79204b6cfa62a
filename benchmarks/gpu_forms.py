"""The sides of the GPU benchmark, and whether each computes what it should.

Two kernels of torch's attention without positions, FlexAttention, the gather form, and relpos' `merged` and
`triton`. FlexAttention changes logits alone: it can hold the keys' table and not the values' one, so it does
less work than the others with positions, and is held against the reference without rel_v.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attention_forms
from attention_forms import Attend, Setting, Step, Tensors, make_tensors
from relpos import relative_attention
from relpos.backends import BACKENDS

KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
SIDES = (*KERNELS, "flex", "gather", "merged", "triton")
# how many of query, key, value, rel_k, rel_v each side is given
NUM_TENSORS = {**dict.fromkeys(KERNELS, 3), "flex": 4, "gather": 5, "merged": 5, "triton": 5}
NAMES = ("out", "grad of query", "grad of key", "grad of value", "grad of rel_k", "grad of rel_v")
# vectors [length, length, d_k] beyond that are of tens of GiB
GATHER_LENGTH = 4096
# highest norm of the error over that of the truth; a term that is missing or of the wrong sign errs by a
# tenth and more
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
SAMPLED_QUERIES = 8


def why_not(name: str, setting: Setting, tensors: Tensors) -> list[str]:
    """Every reason why the side does not run in this setting; an empty list where it does."""
    if name == "gather" and setting.length > GATHER_LENGTH:
        return [f"holds vectors [length, length, d_k]: left out beyond {GATHER_LENGTH:,} tokens"]
    if name not in ("merged", "triton"):
        return []
    if name not in (backend.name for backend in BACKENDS):
        return [f"not available: this relpos has no backend {name!r}"]
    return attention_forms.why_not(name, setting, tensors)


def make_step(name: str, setting: Setting, tensors: Tensors, *, is_compiled: bool = True) -> Step:
    """A function of nothing that runs one pass.

    Args:
        is_compiled: whether FlexAttention is; on a CPU it never is.
    Returns:
        A function that returns (out,), or out and the gradients of the tensors that the side is given.
    """
    if name in ("gather", "merged", "triton"):
        return attention_forms.prepare(name, setting, tensors)
    if name in KERNELS:
        return _pass(_pinned(KERNELS[name], setting, tensors), setting, tensors, num_tensors=3)
    is_compiled = is_compiled and setting.device == "cuda"
    return _pass(_flex(setting, tensors, is_compiled), setting, tensors, num_tensors=4)


def label_logits(query: Tensor, rel_k: Tensor) -> Tensor:
    """scale * query . rel_k[label] for every label: [batch, heads, query, labels] in float32.

    The gradients of all keys beyond the clip distance meet in one of these numbers, which 16 bits cannot sum.
    """
    return (query @ rel_k.mT).float() * query.shape[-1] ** -0.5


def score_mod(logits: Tensor, max_distance: int) -> Callable[..., Tensor]:
    """FlexAttention's change of a logit: plus that of the pair's label."""

    def add(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        label = torch.clamp(j - i, -max_distance, max_distance) + max_distance
        return score + logits[batch, head, i, label]

    return add


def num_flop(setting: Setting) -> float:
    """Operations of plain attention, the same count for every side.

    4 batch heads length^2 d_k forward, 2.5 times that again backward, half of it where causal.
    """
    forward = 4 * setting.batch * setting.heads * setting.length**2 * setting.d_k
    return forward * (3.5 if setting.has_backward else 1.0) * (0.5 if setting.is_causal else 1.0)


def check_small(name: str, setting: Setting) -> None:
    """Hold the side against the reference, on few tokens with near and far pairs: everything it returns.

    FlexAttention is not compiled for it: `check_sample` sees the compiled one. The gather form is held to it
    in float32, because it may sum the gradients of its tables in bfloat16.

    Raises:
        ValueError: it computes something else.
    """
    small = replace(setting, length=2 * setting.max_distance + 48, batch=1, heads=2)
    if name == "gather":
        small = replace(small, dtype="float32")
    _check_once(name, small)


@cache
def _check_once(name: str, setting: Setting) -> None:
    tensors = make_tensors(setting)
    found = make_step(name, setting, tensors, is_compiled=False)()
    _compare(name, setting, found, _truth(name, setting, tensors))


def check_sample(name: str, setting: Setting, tensors: Tensors, found: tuple[Tensor, ...]) -> None:
    """Hold what the side returned at full size against the reference, for a few queries of two heads.

    The output and the gradient of a query depend on no other query; the other gradients, which are sums over
    all of them, must be finite.

    Raises:
        ValueError: it computes something else.
    """
    start = setting.length // 2
    rows = slice(start, start + SAMPLED_QUERIES)
    heads = [0, setting.heads - 1]
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
    """What the reference returns in float64, and the gradients of the first so many tensors."""
    given = [x.detach().double().requires_grad_(x.requires_grad) for x in _given(tensors, NUM_TENSORS[name])]
    out = relative_attention(
        *given,
        *[None] * (5 - len(given)),
        max_distance=setting.max_distance if len(given) > 3 else None,
        query_start=query_start,
        is_causal=setting.is_causal,
        backend="reference",
    )
    if not setting.has_backward:
        return (out,)
    return out, *torch.autograd.grad(out, given[:num_wanted], tensors.grad_out.double())


def _compare(name: str, setting: Setting, found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    most = TOLERANCE[setting.dtype]
    for what, x, true in zip(NAMES, found, truth, strict=False):
        error = ((x.double() - true).norm() / true.norm()).item()
        # so that NaN is an error as well
        if not error <= most:
            raise ValueError(
                f"{name} computes something else: {what} is off by {error:.2g} of its norm, above {most:g}"
            )
    if len(found) != len(truth):
        raise ValueError(f"{name} must return {len(truth)} tensors; got {len(found)}")


def _pass(attend: Attend, setting: Setting, tensors: Tensors, num_tensors: int) -> Step:
    if not setting.has_backward:
        return lambda: (attend(),)
    wanted = _given(tensors, num_tensors)

    def step() -> tuple[Tensor, ...]:
        out = attend()
        return out, *torch.autograd.grad(out, wanted, tensors.grad_out)

    return step


def _given(tensors: Tensors, num_tensors: int) -> tuple[Tensor, ...]:
    """The first so many of query, key, value, rel_k, rel_v."""
    return tensors[:5][:num_tensors]


def _pinned(kernel: SDPBackend, setting: Setting, tensors: Tensors) -> Attend:
    """torch's attention by this kernel or not at all; on a CPU, which lacks both, by plain operators."""
    chosen = kernel if setting.device == "cuda" else SDPBackend.MATH

    def attend() -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(*tensors[:3], is_causal=setting.is_causal)

    return attend


def _flex(setting: Setting, tensors: Tensors, is_compiled: bool) -> Attend:
    """FlexAttention over the keys' table. The label logits belong to the call, as do their gradients."""
    mask = None
    if setting.is_causal:
        shape = (setting.length, setting.length)
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, *shape, device=setting.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> Tensor:
        change = score_mod(logits, setting.max_distance)
        return flex_attention(query, key, value, score_mod=change, block_mask=mask)

    if is_compiled:
        # each shape is compiled for itself, and graphs of earlier shapes would count against a limit
        torch.compiler.reset()
        attend = torch.compile(attend, dynamic=False, fullgraph=True)
    else:
        attend = partial(_without_warning, attend)
    query, key, value, rel_k = tensors[:4]
    return lambda: attend(query, key, value, label_logits(query, rel_k))


def _without_warning(attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # that it is slow uncompiled is known: it is checked here and not timed
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return attend(*tensors)
