"""Absolute positions, which are added to embeddings; relative ones are in attention."""

import math

import torch
from torch import Tensor, nn

from relpos.translation.errors import InputError


class TooLongError(InputError, ValueError):
    """A sequence is longer than the table of learned positions. A command prints it as one line."""


def position_ids(
    mask: Tensor | None, *, batch: int, length: int, start: int | Tensor, device: torch.device
) -> Tensor:
    """Position of each token of a chunk, [batch, chunk], counted from the first token that is not padding.

    Args:
        mask: [batch, key], 1 for tokens, 0 for padding, cached tokens included. A mask of another rank does
            not tell padding, so that positions are counted from the first token.
        start: number of tokens before the chunk.
    """
    places = torch.arange(length, device=device) + start
    if mask is None or mask.dim() != 2:
        return places.expand(batch, -1)
    counted = ((mask != 0).long().cumsum(1) - 1).clamp(min=0)
    return counted.index_select(1, places).expand(batch, -1)


def add_positions(x: Tensor, table: nn.Embedding | None, places: Tensor) -> Tensor:
    """Add the absolute positions `places` [batch, length] to x [batch, length, d_model].

    Args:
        table: learned positions; None for sinusoidal ones.
    Raises:
        TooLongError: positions are learned, and the table is shorter.
    """
    if table is None:
        return x + sinusoids(places, x.shape[-1]).to(x.dtype)
    last = table.num_embeddings
    if not torch.compiler.is_compiling() and places.numel() and int(places.max()) >= last:
        raise TooLongError(
            f"positions must be below max_positions = {last}, since they are learned; got position "
            f"{int(places.max())}. Shorten the input, or train with relative positions."
        )
    return x + table(places)


def sinusoids(position_ids: Tensor, d_model: int) -> Tensor:
    """The sine and cosine of each position, [..., d_model], float32.

    Source: Vaswani et al. 2017, section 3.5; sines first, then cosines, as in tensor2tensor.
    """
    half = (d_model + 1) // 2
    exponent = torch.arange(half, device=position_ids.device, dtype=torch.float32) / max(half - 1, 1)
    angle = position_ids[..., None].float() * torch.exp(exponent * -math.log(10_000.0))
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[..., :d_model]
