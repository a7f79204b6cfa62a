"""The fused kernels of CUDA as operators for the CPU: slow, and as strict about arguments as torch's own.

What the real ones refuse is asserted, and so is what they take without a word and get wrong. Read off torch's
source, not copied from it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def is_aligned(x: Tensor) -> bool:
    """Whether each token of x begins where the kernels load 16 bytes at once, wherever x itself begins."""
    step = 16 // x.element_size()
    return x.stride(-1) == 1 and all(y % step == 0 for y in (x.storage_offset(), *x.stride()[:-1]))


class Operators:
    """The operators of CUDA: what they refuse or silently get wrong, as assertions, and what they compute.

    Args:
        dtypes: what takes the place of the dtypes of both kernels, and of the float32 of lse.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = ()) -> None:
        self.flash_dtypes = dtypes or HALVES
        self.efficient_dtypes = dtypes or (torch.float32,)
        self.lse_dtype = dtypes[0] if dtypes else torch.float32
        self.calls: list[str] = []

    def check(self, qkv: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...], multiple: int) -> None:
        query, key, value = qkv
        assert query.dtype in dtypes
        assert {x.dtype for x in qkv} == {query.dtype}
        assert len({x.device for x in qkv}) == 1
        assert key.shape == value.shape
        assert query.shape[:2] == key.shape[:2]
        assert query.shape[3] == key.shape[3]
        assert query.shape[3] % multiple == 0
        assert all(is_aligned(x) for x in qkv)
        # a launch of nothing is an error of CUDA
        assert 0 not in query.shape
        assert 0 not in key.shape

    def check_call(self, qkv: tuple[Tensor, ...], dropout_p: float, is_causal: bool, scale: Any) -> None:
        assert dropout_p == 0.0
        assert isinstance(scale, float)
        assert scale > 0
        # FlashAttention begins the diagonal in the lower right corner, the other in the upper left
        assert not is_causal or qkv[0].shape[2] == qkv[1].shape[2]

    def check_grads(self, qkv: tuple[Tensor, ...], grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        for x in (grad_out, out):
            assert x.dtype == qkv[0].dtype
            assert x.shape == qkv[0].shape
            assert x.device == qkv[0].device
        assert is_aligned(grad_out)
        assert lse.dtype == self.lse_dtype
        assert lse.device == qkv[0].device
        assert lse.is_contiguous()

    def check_flash(self, query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        self.check((query, key, value), self.flash_dtypes, 8)
        self.check_call((query, key, value), dropout_p, is_causal, scale)
        assert query.shape[3] <= 256
        assert debug is False

    def check_flash_backward(
        self, grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
        seed, offset, *, scale=None,
    ):  # fmt: skip
        self.check_flash(query, key, value, dropout_p, is_causal, scale=scale)
        self.check_grads((query, key, value), grad_out, out, lse)
        assert is_aligned(out)
        assert lse.shape == query.shape[:3]
        assert cum_q is None
        assert cum_k is None
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert (seed.dtype, seed.shape, seed.device) == (torch.uint64, (2,), query.device)
        assert (offset.dtype, offset.shape, offset.device) == (torch.uint64, (), query.device)

    def check_efficient(
        self, query, key, value, bias, needs_lse, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        self.check((query, key, value), self.efficient_dtypes, 4)
        self.check_call((query, key, value), dropout_p, is_causal, scale)
        assert bias is None
        assert needs_lse is True

    def check_efficient_backward(
        self, grad_out, query, key, value, bias, out, lse, seed, offset, dropout_p, needs, is_causal=False,
        *, scale=None,
    ):  # fmt: skip
        self.check_efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
        self.check_grads((query, key, value), grad_out, out, lse)
        # its address is reckoned as that of [batch, query, heads, width]
        assert out.transpose(1, 2).is_contiguous()
        assert lse.shape == (*query.shape[:2], -(-query.shape[2] // 32) * 32)
        assert all(x.dtype == torch.int64 and x.shape == () for x in (seed, offset))
        assert list(needs) == [True, True, True, False]

    def flash(self, query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        self.calls.append("flash")
        self.check_flash(query, key, value, dropout_p, is_causal, debug, scale=scale)
        out, lse = self.attend(query, key, value, is_causal, scale)
        state = query.new_zeros(2, dtype=torch.uint64), query.new_zeros((), dtype=torch.uint64)
        return out, lse, None, None, query.shape[2], key.shape[2], *state, query.new_empty(0)

    def flash_backward(self, grad_out, query, key, value, out, lse, *others, scale=None):
        self.calls.append("flash_backward")
        self.check_flash_backward(grad_out, query, key, value, out, lse, *others, scale=scale)
        return self.gradients(grad_out, query, key, value, out, lse, others[5], scale)

    def efficient(self, query, key, value, bias, needs_lse, dropout_p=0.0, is_causal=False, *, scale=None):
        self.calls.append("efficient")
        self.check_efficient(query, key, value, bias, needs_lse, dropout_p, is_causal, scale=scale)
        out, lse = self.attend(query, key, value, is_causal, scale)
        padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
        padded[..., : lse.shape[2]] = lse
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, padded, *(query.new_zeros((), dtype=torch.int64) for _ in range(2))

    def efficient_backward(
        self, grad_out, query, key, value, bias, out, lse, seed, offset, dropout_p, needs, is_causal=False,
        *, scale=None,
    ):  # fmt: skip
        self.calls.append("efficient_backward")
        self.check_efficient_backward(
            grad_out,
            query,
            key,
            value,
            bias,
            out,
            lse,
            seed,
            offset,
            dropout_p,
            needs,
            is_causal,
            scale=scale,
        )
        assert (lse[..., query.shape[2] :] == math.inf).all()
        lse = lse[..., : query.shape[2]]
        return *self.gradients(grad_out, query, key, value, out, lse, is_causal, scale), None

    def weights(self, query, key, lse, is_causal, scale):
        logits = scale * query.to(self.lse_dtype) @ key.to(self.lse_dtype).mT
        if is_causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
        lse = torch.logsumexp(logits, -1) if lse is None else lse
        return (logits - lse[..., None]).exp(), lse

    def attend(self, query, key, value, is_causal, scale):
        weights, lse = self.weights(query, key, None, is_causal, scale)
        # the kernels multiply in the dtype of value and add up in that of lse
        out = weights.to(value.dtype).to(lse.dtype) @ value.to(lse.dtype)
        return out.to(query.dtype), lse

    def gradients(self, grad_out, query, key, value, out, lse, is_causal, scale):
        assert lse.isfinite().all()
        weights, _ = self.weights(query, key, lse, is_causal, scale)
        wide = [x.to(lse.dtype) for x in (grad_out, query, key, value, out)]
        grad_weights = wide[0] @ wide[3].mT - (wide[0] * wide[4]).sum(-1, keepdim=True)
        grad_logits = (weights * grad_weights).to(query.dtype).to(lse.dtype)
        weights = weights.to(query.dtype).to(lse.dtype)
        grads = scale * grad_logits @ wide[2], scale * grad_logits.mT @ wide[1], weights.mT @ wide[0]
        return tuple(x.to(query.dtype) for x in grads)


def of_cuda(operators: Operators) -> dict[str, tuple[Callable[..., Any], Callable[..., None]]]:
    """What computes and what checks each operator of CUDA, by its name."""
    return {
        "_scaled_dot_product_flash_attention": (operators.flash, operators.check_flash),
        "_scaled_dot_product_flash_attention_backward": (
            operators.flash_backward,
            operators.check_flash_backward,
        ),
        "_scaled_dot_product_efficient_attention": (operators.efficient, operators.check_efficient),
        "_scaled_dot_product_efficient_attention_backward": (
            operators.efficient_backward,
            operators.check_efficient_backward,
        ),
    }
