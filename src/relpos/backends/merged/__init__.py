"""Exact relative attention built on torch's fused attention kernels, with no [query, key] tensor."""

from relpos.backends.merged.backend import run, why_not

__all__ = ["run", "why_not"]
