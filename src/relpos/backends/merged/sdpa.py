"""torch's fused kernels of plain attention behind one signature: one of the CPU and two of CUDA.

What an operator demands beyond the shapes (strides, a padded log-sum-exp) is met here and nowhere else. The
two of CUDA were held against torch's source, and against what its operators return for tensors without
numbers; on a GPU they were never run.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

# the kernels of CUDA load so many bytes of a row at once
_ALIGNMENT = 16
# the second kernel of CUDA keeps the log-sum-exp of so many queries at once
_LSE_BLOCK = 32
# the widest head of the flash kernel of CUDA
_WIDEST = 256
# a build for the CPU has none, and no tensor on CUDA that holds numbers either
_HAS_FLASH = torch.version.cuda is None or torch.backends.cuda.is_flash_attention_available()


class Fused(NamedTuple):
    """One fused kernel: query, key and value [batch, heads, length, width], of one width and one dtype.

    Args:
        multiple: what the width must be a multiple of.
        forward: (query, key, value, is_causal, scale) -> (out, lse): out in the dtype of query, lse
            [batch, heads, query] in float32, of float64 in float64.
        backward: (grad_out, query, key, value, out, lse, is_causal, scale) -> the gradients of query, key and
            value, in their dtype. Weights are exp(scale * query . key - lse), whatever out and lse are.

    Every query must have a key. Where `is_causal`, query i counts keys 0 to i, and there must be as many
    queries as keys: in a rectangle the kernels begin the diagonal in different corners.
    """

    multiple: int
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel(device: torch.device, dtype: torch.dtype) -> Fused:
    """The kernel for tensors of this dtype on this device."""
    return KERNELS[device.type, dtype]


def reasons_against(device: torch.device, dtype: torch.dtype, width: int) -> list[str]:
    """Why no kernel takes heads of this width in this dtype on this device; empty where one does."""
    if device.type == "cpu":
        return []
    if device.type != "cuda":
        return [f"runs on the CPU and CUDA, and query is on {device}"]
    if dtype == torch.float64:
        return ["has no fused kernel for float64 on CUDA"]
    if torch.version.hip is not None:
        return ["takes NVIDIA's GPUs alone: ROCm lays out what the kernels return in another way"]
    if dtype == torch.float32:
        return []
    reasons = []
    if width > _WIDEST:
        reasons.append(f"has no fused kernel for 16 bits on CUDA with heads wider than {_WIDEST}")
    if not _HAS_FLASH:
        reasons.append("has no fused kernel for 16 bits on CUDA in this build of torch")
    # a property and not torch.cuda.get_device_capability, which no compiled function can ask
    if not torch.cuda.is_available():
        return reasons
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        reasons.append("has no fused kernel for 16 bits on GPUs of a compute capability below 8.0")
    # of those torch's own choice leaves out the same widths, for gradients
    is_small = (properties.major, properties.minor) in ((8, 6), (8, 9)) or properties.major == 12
    if is_small and 192 < width <= 224:
        reasons.append(f"has no fused kernel for 16 bits on {properties.name} with heads of 193 to 224")
    return reasons


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (_dense_rows(x) for x in (query, key, value))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return out, lse


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value = (_dense_rows(x) for x in (grad_out, query, key, value))
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
    )
    return grads


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (_aligned(x) for x in (query, key, value))
    # out, lse, and what a backward pass with dropout or with ragged sequences would need
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value, out = (_aligned(x) for x in (grad_out, query, key, value, out))
    # where random numbers began; without dropout nobody reads it
    state = query.new_zeros(2, dtype=torch.uint64), query.new_zeros((), dtype=torch.uint64)
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        # read by its address, not by its strides
        lse.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        *state,
        scale=scale,
    )
    return grads


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (_aligned(x) for x in (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value = (_aligned(x) for x in (grad_out, query, key, value))
    # the distance between queries is not asked of out but taken for that of [batch, query, heads, width]
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # a query that is not there has all weights 0
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_BLOCK), value=float("inf")).contiguous()
    state = query.new_zeros((), dtype=torch.int64)
    grad_query, grad_key, grad_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        query,
        key,
        value,
        None,
        out,
        lse,
        state,
        state,
        0.0,
        (True, True, True, False),
        is_causal,
        scale=scale,
    )
    return grad_query, grad_key, grad_value


def _dense_rows(x: Tensor) -> Tensor:
    """x with the numbers of one token side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x with the numbers of one token side by side, and each token where a load may begin."""
    step = _ALIGNMENT // x.element_size()
    begins = (x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) == 1 and all(begin % step == 0 for begin in begins):
        return x
    # not contiguous(), which leaves the offset, and the stride of what there is one of, as they are
    return x.clone(memory_format=torch.contiguous_format)


CPU = Fused(1, _cpu_forward, _cpu_backward)
# FlashAttention, which takes 16 bits alone, and adds up in float32
FLASH = Fused(8, _flash_forward, _flash_backward)
# "memory-efficient attention", which takes float32 too
EFFICIENT = Fused(4, _efficient_forward, _efficient_backward)

# by the type of a device and the dtype of query, key and value
KERNELS: dict[tuple[str, torch.dtype], Fused] = {
    ("cpu", torch.float64): CPU,
    ("cpu", torch.float32): CPU,
    ("cpu", torch.bfloat16): CPU,
    ("cpu", torch.float16): CPU,
    ("cuda", torch.float32): EFFICIENT,
    ("cuda", torch.bfloat16): FLASH,
    ("cuda", torch.float16): FLASH,
}
