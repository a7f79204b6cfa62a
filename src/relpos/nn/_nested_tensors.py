"""Nested tensors: `torch.nn.TransformerEncoder` passes them to its layers in eval mode, without gradients.

They have the layout torch.strided. Attention pads them, and removes the padding from its output. Nothing else
in `relpos.nn` takes a nested tensor, and nothing one of layout torch.jagged.
"""

import torch
from torch import Tensor


def are_nested_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three are nested tensors of sequences, layout torch.strided, with the same lengths."""
    if not all(
        isinstance(x, Tensor) and x.is_nested and x.layout == torch.strided for x in (query, key, value)
    ):
        return False
    # padding would fill up a sequence that is narrower than others
    if not all(x.dim() == 3 and len(_sizes(x)[:, 1].unique()) == 1 for x in (query, key, value)):
        return False
    return all(x is query or torch.equal(_lengths(x), _lengths(query)) for x in (key, value))


def padded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All three padded with zeros, [batch, length, width], and the padding mask, bool [batch, length]."""
    # a shared tensor stays shared: it is projected once
    nested = {id(x): x for x in (query, key, value)}
    dense = {i: torch.nested.to_padded_tensor(x, 0.0) for i, x in nested.items()}
    padded_query = dense[id(query)]
    padding = torch.arange(padded_query.shape[1], device=query.device) >= _lengths(query)[:, None]
    return padded_query, dense[id(key)], dense[id(value)], padding


def nested_like(out: Tensor, padding: Tensor) -> Tensor:
    """`out` [batch, length, width] as a nested tensor without padding."""
    return torch._nested_tensor_from_mask(out, ~padding, mask_check=False)


def _lengths(x: Tensor) -> Tensor:
    """The length of each sequence in tokens, [batch]."""
    return _sizes(x)[:, 0].to(x.device)


def _sizes(x: Tensor) -> Tensor:
    """Length and width of each sequence, [batch, 2]."""
    return x._nested_tensor_size()
