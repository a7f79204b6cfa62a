"""Exact relative attention out of torch's fused kernels, with no [query, key] tensor.

Beyond the clip distance one row of each table serves all keys (paper, section 3.2): there plain attention has
the right weights among its own keys, its log-sum-exp lacks query . rel_k[row], its output lacks rel_v[row].
So a far region enters the softmax over the near distances as one more label, whose logit is its log-sum-exp.
"""

from typing import Any

import torch
from torch import Tensor

from relpos._inputs import Inputs, can_look_at
from relpos.backends.backend import no_second_derivative, reasons_against_operators
from relpos.backends.merged.merge import Gradients, Results, attend, empty_results, gradients
from relpos.backends.merged.partition import Problem
from relpos.backends.merged.sdpa import reasons_against
from relpos.backends.operator import needs_gradient


def why_not(inputs: Inputs) -> list[str]:
    """Every reason against it."""
    query, value = inputs.query, inputs.value
    # sums in float64 are the kernel's own
    dtype = torch.float64 if inputs.compute_dtype == torch.float64 else query.dtype
    reasons = reasons_against(query.device, dtype, max(query.shape[3], value.shape[3]))
    if inputs.relations is not None:
        reasons.append("supports relative_attention only, not relation_attention")
    if inputs.attn_mask is not None and inputs.query.device.type == "cuda":
        reasons.append("takes no attn_mask on CUDA: give key_lengths where it hides keys at the end")
    elif inputs.attn_mask is not None and _lengths(inputs.attn_mask, inputs) is None:
        reasons.append(
            "takes no attn_mask but a bool one that hides keys at the end, and not while compiling"
        )
    if inputs.dropout_p > 0:
        reasons.append("has no dropout: give dropout_p=0.0, or layers attention_dropout=0.0")
    return reasons + reasons_against_operators()


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse is None where it was not asked for."""
    start = inputs.query_start
    query, scale = inputs.query, inputs.scale
    if scale <= 0:
        # the fused kernel scales after it has hidden pairs with -inf
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    tensors = (query, inputs.key, inputs.value, inputs.rel_k, inputs.rel_v)
    needs_grad = needs_gradient(inputs)
    key_lengths = inputs.key_lengths
    if inputs.attn_mask is not None:
        lengths = _lengths(inputs.attn_mask, inputs)
        assert lengths is not None
        key_lengths = lengths if key_lengths is None else torch.minimum(lengths, key_lengths)
    out, lse, _, _ = torch.ops.relpos.merged(
        *tensors,
        start if isinstance(start, Tensor) else None,
        0 if isinstance(start, Tensor) else start,
        key_lengths,
        inputs.left,
        inputs.right,
        inputs.is_causal,
        scale,
        inputs.return_lse or needs_grad,
        needs_grad,
    )
    return out, lse if inputs.return_lse else None


def _lengths(mask: Tensor, inputs: Inputs) -> Tensor | None:
    """The keys that a mask leaves to each sequence, [batch], if it hides the last ones; otherwise None."""
    batch, num_keys = inputs.query.shape[0], inputs.key.shape[2]
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or not can_look_at(mask):
        return None
    allowed = mask[:, 0, 0].expand(-1, num_keys)  # [1 or batch, key]
    lengths = allowed.sum(-1)
    j = torch.arange(num_keys, device=mask.device)
    return lengths.expand(batch) if torch.equal(allowed, j < lengths[:, None]) else None


# the fields of Problem, in their order
_PROBLEM = (
    "Tensor query, Tensor key, Tensor value, Tensor? rel_k, Tensor? rel_v, Tensor? starts, SymInt start, "
    "Tensor? key_lengths, SymInt left, SymInt right, bool is_causal, float scale"
)
# starts and lengths of sequences are looked at, for which a graph of CUDA cannot wait
_TAGS = (torch.Tag.cudagraph_unsafe,)
torch.library.define(
    "relpos::merged",
    f"({_PROBLEM}, bool needs_lse, bool needs_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "relpos::merged_backward",
    f"({_PROBLEM}, Tensor[] results, Tensor grad_out, Tensor? grad_lse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("relpos::merged", ("CPU", "CUDA"))
def _merged(*arguments: Any) -> Results:
    *problem, needs_lse, needs_grad = arguments
    return attend(Problem(*problem), needs_lse, needs_grad)


@torch.library.impl("relpos::merged_backward", ("CPU", "CUDA"))
def _merged_backward(*arguments: Any) -> Gradients:
    *problem, results, grad_out, grad_lse = arguments
    return gradients(Problem(*problem), results, grad_out, grad_lse)


@torch.library.register_fake("relpos::merged")
def _fake(*arguments: Any) -> Results:
    *problem, needs_lse, needs_grad = arguments
    return empty_results(Problem(*problem), needs_lse, needs_grad)


@torch.library.register_fake("relpos::merged_backward")
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    query, *others = arguments[:5]
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (query, *others))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    problem = Problem(*inputs[:-2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *problem.tensors)
    ctx.problem = problem.with_tensors([None] * len(problem.tensors))


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Any, ...]:
    # read once: what unpacks them may do so only once, as checkpoints do
    saved = ctx.saved_tensors
    results, problem = list(saved[:4]), ctx.problem.with_tensors(saved[4:])
    if grad_out is None:
        grad_out = torch.zeros_like(results[0])
    grads = torch.ops.relpos.merged_backward(*problem, results, grad_out, grad_lse)
    of_tensors = [None if x is None else grad for x, grad in zip(problem[:5], grads, strict=True)]
    return *of_tensors, *[None] * (len(problem) + 2 - len(of_tensors))


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise no_second_derivative("merged")


torch.library.register_autograd("relpos::merged", _backward, setup_context=_keep)
torch.library.register_autograd("relpos::merged_backward", _refuse)
