"""Small modules of `relpos.nn`, their inputs, and the parts of a message, for the tests of refusals."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos.nn import RelativeMultiheadAttention

WIDTH, HEADS, BATCH, QUERIES, KEYS = 16, 4, 2, 5, 7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def attention(**settings: Any) -> RelativeMultiheadAttention:
    return RelativeMultiheadAttention(WIDTH, HEADS, **{"batch_first": True, "max_distance": None} | settings)


def layer(kind: type, **settings: Any) -> Any:
    return kind(**{"d_model": WIDTH, "nhead": HEADS, "batch_first": True, "max_distance": 2} | settings)


def refuses(error: type[Exception], *parts: str) -> Any:
    """The message begins with the first part, and has the others in this order."""
    return pytest.raises(error, match="^" + ".*".join(map(re.escape, parts)))


QUERY, KEY = draw(BATCH, QUERIES, WIDTH), draw(BATCH, KEYS, WIDTH)
