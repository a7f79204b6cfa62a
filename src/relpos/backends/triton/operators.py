"""relpos::triton and relpos::triton_backward: torch.compile sees into them, down to the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op

from relpos.backends.operator import differentiable, empty_gradients
from relpos.backends.triton.block import IS_INTERPRETED
from relpos.backends.triton.call import Call, device_of
from relpos.backends.triton.launch import Saved, attend, empty_results, gradients

# the interpreter takes no kernel apart, and none of what stands for a tensor while torch traces
_operator = custom_op if IS_INTERPRETED.value else triton_op


@_operator("relpos::triton", mutates_args=())
def _triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    relations: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    start: int,
    key_lengths: Tensor | None,
    left: int,
    right: int,
    is_causal: bool,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    keeps_rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(
        *(query, key, value, rel_k, rel_v, relations, mask, starts, start, key_lengths, left, right),
        *(is_causal, seed, dropout_p, scale, keeps_rest),
    )
    with device_of(query):
        return attend(call, torch.are_deterministic_algorithms_enabled())


@_operator("relpos::triton_backward", mutates_args=())
def _triton_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    relations: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    start: int,
    key_lengths: Tensor | None,
    left: int,
    right: int,
    is_causal: bool,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    keeps_rest: bool,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    peaks: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(
        *(query, key, value, rel_k, rel_v, relations, mask, starts, start, key_lengths, left, right),
        *(is_causal, seed, dropout_p, scale, keeps_rest),
    )
    saved = Saved(out, lse, rest, peaks, grad_out, grad_lse)
    with device_of(query):
        grads = gradients(call, saved, needs, torch.are_deterministic_algorithms_enabled())
    return grads[0], grads[1], grads[2], grads[3], grads[4]


def _fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_results(Call(*given))


if IS_INTERPRETED.value:
    _triton.register_fake(_fake)
    _triton_backward.register_fake(empty_gradients)
run = differentiable("triton", num_arguments=17, num_results=4)
