"""relpos::triton and relpos::triton_backward: torch.compile sees into them, down to the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op

from relpos.backends.arguments import NUM_ARGUMENTS, takes_arguments
from relpos.backends.operator import differentiable, empty_gradients
from relpos.backends.triton.block import IS_INTERPRETED
from relpos.backends.triton.call import Call, device_of
from relpos.backends.triton.launch import Saved, attend, empty_results, gradients

# the interpreter takes no kernel apart, and none of what stands for a tensor while torch traces
_operator = custom_op if IS_INTERPRETED.value else triton_op
# whether a backward pass may come, which wants more than out and lse
_MORE = {"keeps_rest": bool}


@_operator("relpos::triton", mutates_args=())
@takes_arguments(_MORE, num_results=4)
def _triton(*given: Any) -> tuple[Tensor, ...]:
    *arguments, keeps_rest = given
    call = Call(*arguments)
    with device_of(call.query):
        return attend(call, keeps_rest, torch.are_deterministic_algorithms_enabled())


@_operator("relpos::triton_backward", mutates_args=())
@takes_arguments(_MORE, Saved.__annotations__, {"needs": int}, num_results=5)
def _triton_backward(*given: Any) -> tuple[Tensor, ...]:
    call, saved = Call(*given[:NUM_ARGUMENTS]), Saved(*given[NUM_ARGUMENTS + len(_MORE) : -1])
    with device_of(call.query):
        return gradients(call, saved, given[-1], torch.are_deterministic_algorithms_enabled())


def _fake(*given: Any) -> tuple[Tensor, ...]:
    *arguments, keeps_rest = given
    return empty_results(Call(*arguments), keeps_rest)


if IS_INTERPRETED.value:
    _triton.register_fake(_fake)
    _triton_backward.register_fake(empty_gradients)
run = differentiable("triton")
