"""Fused relative attention on the CPU: a kernel in C++."""

from relpos.backends.cpu.backend import run, why_not

__all__ = ["run", "why_not"]
