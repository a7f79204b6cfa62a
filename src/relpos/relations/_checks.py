"""Checks of the arguments of `relpos.relations`."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from relpos._positions import INT_TYPES

# uint8 has no -1
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
INDEX_DTYPES = (*LABEL_DTYPES, torch.uint8)


def check_range(name: str, x: Tensor, first: int, end: int, advice: str) -> None:
    for value in x.aminmax() if x.numel() else ():
        if not first <= value.item() < end:
            raise ValueError(
                f"{name} must be at least {first} and less than {end}; got {value.item()}. {advice}"
            )


def check_integers(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of integers; got {type(x).__name__}. Make it a tensor.")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} must be a tensor of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}; "
            f"got {x.dtype}. Convert it with .long()."
        )


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    # a str is a sequence of strings too, and no list of names
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"names must be a tuple or list of strings; got {type(names).__name__}. Name each label."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"names must be strings; got {type(name).__name__}. Say in words what each label means."
            )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"names must be different; got {twice[0]!r} for two labels. Rename one.")
    return tuple(names)


def check_count(name: str, count: int, unit: str = "tokens") -> None:
    if isinstance(count, bool) or not isinstance(count, INT_TYPES):
        raise TypeError(f"{name} must be an integer; got {type(count).__name__}. It counts {unit}.")
    if count < 0:
        raise ValueError(f"{name} must be at least 0; got {count}. It counts {unit}.")


def both_sides(name: str, sides: int | tuple[int, int], pair: str, unit: str) -> tuple[int, int]:
    """Both of `sides`, which an error calls `name`, with `pair` for two and `unit` for what they count."""
    found = tuple(sides) if isinstance(sides, (tuple, list)) else (sides, sides)
    if len(found) != 2 or any(isinstance(side, bool) or not isinstance(side, INT_TYPES) for side in found):
        raise TypeError(
            f"{name} must be an integer k, or two integers {pair}; got {sides!r}. It says where to clip."
        )
    if found[0] < 0 or found[1] < 0:
        raise ValueError(f"{name} must be at least 0; got {sides!r}. It counts {unit}.")
    return found[0], found[1]
