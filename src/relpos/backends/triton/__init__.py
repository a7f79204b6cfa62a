"""Fused relative attention on NVIDIA GPUs: kernels in Triton."""

from relpos.backends.triton.backend import run, why_later, why_not

__all__ = ["run", "why_later", "why_not"]
