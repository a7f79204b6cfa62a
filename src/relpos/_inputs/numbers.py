"""Checks of single numbers: dropout, scale and switches."""

import math
import sys

import torch

from relpos._inputs.tensors import kind_of


def checked_dropout(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float, torch.SymFloat)):
        raise TypeError(f"dropout_p must be a number; got {kind_of(dropout_p)}. It is a probability.")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1; got {dropout_p}. It is a probability.")
    return dropout_p


def checked_scale(scale: float | None, d_k: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d_k)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"scale must be a number or None; got {kind_of(scale)}. Multiply query by what is learned."
        )
    # while torch traces, numbers may be symbols
    is_number = not torch.compiler.is_compiling() and isinstance(scale, (int, float))
    if is_number and not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale must be finite; got {scale}. Leave it out for 1 / sqrt(d_k).")
    return scale


def checked_flag(name: str, flag: bool) -> bool:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False; got {kind_of(flag)}. Give a bool.")
    return flag
