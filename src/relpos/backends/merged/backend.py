"""Exact relative attention built on torch's fused attention kernels, with no [query, key] tensor.

Beyond the clip distance one row of each table serves all keys (paper, section 3.2): there plain attention has
the right weights among its own keys, its log-sum-exp lacks query . rel_k[row], its output lacks rel_v[row].
So a far region enters the softmax over the near distances as one more label, whose logit is its log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relpos._inputs import Inputs, can_look_at
from relpos.backends.arguments import NUM_ARGUMENTS, arguments, needs_gradient, takes_arguments
from relpos.backends.backend import reasons_against_operators
from relpos.backends.merged.backward import Saved, gradients
from relpos.backends.merged.forward import Results, attend, empty_results
from relpos.backends.merged.problem import Problem
from relpos.backends.merged.sdpa import reasons_against
from relpos.backends.operator import differentiable, empty_gradients


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
    query, scale, lengths = inputs.query, inputs.scale, inputs.key_lengths
    if scale <= 0:
        # the fused kernel scales after it has hidden pairs with -inf
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if inputs.attn_mask is not None:
        allowed = _lengths(inputs.attn_mask, inputs)
        assert allowed is not None
        lengths = allowed if lengths is None else torch.minimum(allowed, lengths)
    needs_grad = needs_gradient(inputs)
    plain = replace(inputs, query=query, scale=scale, key_lengths=lengths, attn_mask=None)
    out, lse, _, _ = _attend(*arguments(plain), inputs.return_lse or needs_grad, needs_grad)
    return out.to(inputs.query.dtype), lse if inputs.return_lse else None


def _lengths(mask: Tensor, inputs: Inputs) -> Tensor | None:
    """The keys that a mask leaves to each sequence, [batch], if it hides the last ones; otherwise None."""
    batch, num_keys = inputs.query.shape[0], inputs.key.shape[2]
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or not can_look_at(mask):
        return None
    allowed = mask[:, 0, 0].expand(-1, num_keys)  # [1 or batch, key]
    lengths = allowed.sum(-1)
    j = torch.arange(num_keys, device=mask.device)
    return lengths.expand(batch) if torch.equal(allowed, j < lengths[:, None]) else None


# whether out is enough, and whether a backward pass may come
_MORE = {"needs_lse": bool, "needs_grad": bool}


@takes_arguments(_MORE, num_results=4)
def _merged(*given: Any) -> Results:
    return attend(Problem(*given[:NUM_ARGUMENTS]), *given[NUM_ARGUMENTS:])


@takes_arguments(_MORE, Saved.__annotations__, {"needs": int}, num_results=5)
def _merged_backward(*given: Any) -> tuple[Tensor, ...]:
    problem, saved = Problem(*given[:NUM_ARGUMENTS]), Saved(*given[NUM_ARGUMENTS + len(_MORE) : -1])
    return gradients(problem, saved, given[-1])


def _fake(*given: Any) -> Results:
    return empty_results(Problem(*given[:NUM_ARGUMENTS]), *given[NUM_ARGUMENTS:])


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in empty_gradients(*given))


def _define(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of torch; not by `custom_op`, which takes longer to reach."""
    # starts and lengths of sequences are looked at, for which a graph of CUDA cannot wait
    tags = (torch.Tag.cudagraph_unsafe,)
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()), tags=tags)
    torch.library.impl(name, ("CPU", "CUDA"), function)
    torch.library.register_fake(name, fake)


_define("relpos::merged", _merged, _fake)
_define("relpos::merged_backward", _merged_backward, _fake_backward)
_attend = differentiable("merged")
