"""A plugin of pytest that puts modules of `relpos.nn` in the place of torch's, for torch's own tests.

PEERS_SIDE says with which distances: "torch" leaves torch's classes, "relpos-no-distances" has max_distance
None, "relpos-distances" has tables of distances that hold zeros, with which attention is torch's.
"""

import os
from typing import Any

import torch
from torch import nn

from relpos.nn import (
    RelativeMultiheadAttention,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

DISTANCES = {"relpos-no-distances": None, "relpos-distances": 4}


def with_distance(base: type[nn.Module], name: str, max_distance: int | None) -> type[nn.Module]:
    """A class that is made as torch's `name` is: `base`, with this distance, and tables that stay zero."""

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, *arguments, **{"max_distance": max_distance} | options)
        # before each call, since some tests fill all parameters with numbers of their own
        self.register_forward_pre_hook(empty_tables)

    return type(name, (base,), {"__init__": make})


def empty_tables(module: nn.Module, inputs: tuple) -> None:
    """Write zeros into the tables of a module and of those in it."""
    for name, parameter in module.named_parameters():
        if "relative_position" in name:
            nn.init.zeros_(parameter)


def pytest_configure() -> None:
    """Replace the classes before pytest imports the tests."""
    side = os.environ["PEERS_SIDE"]
    if side == "torch":
        return
    layers = {
        "MultiheadAttention": RelativeMultiheadAttention,
        "TransformerEncoderLayer": RelativeTransformerEncoderLayer,
        "TransformerDecoderLayer": RelativeTransformerDecoderLayer,
    }
    for name, base in layers.items():
        setattr(torch.nn, name, with_distance(base, name, DISTANCES[side]))
    # a stack is given its layers
    torch.nn.TransformerEncoder = RelativeTransformerEncoder
    torch.nn.TransformerDecoder = RelativeTransformerDecoder
