"""Nested tensors, as `torch.nn.TransformerEncoder` hands them to its layers where padding is to be cut out.

It does so in eval mode and without gradients, in the layout torch.strided. Here they are padded, and the
output is cut again.
"""

import torch
from torch import Tensor


def are_nested_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are nested tensors in the layout torch.strided with the same lengths."""
    if not all(
        isinstance(x, Tensor) and x.is_nested and x.layout == torch.strided for x in (query, key, value)
    ):
        return False
    return all(x is query or torch.equal(_lengths(x), _lengths(query)) for x in (key, value))


def padded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All three filled up with zeros, [batch, length, width], and where these are, bool [batch, length]."""
    # what is one tensor stays one, and is projected in one product
    nested = {id(x): x for x in (query, key, value)}
    dense = {i: torch.nested.to_padded_tensor(x, 0.0) for i, x in nested.items()}
    of_query = dense[id(query)]
    padding = torch.arange(of_query.shape[1], device=query.device) >= _lengths(query)[:, None]
    return of_query, dense[id(key)], dense[id(value)], padding


def nested_like(out: Tensor, padding: Tensor) -> Tensor:
    """`out` [batch, length, width] without its padding, as a nested tensor."""
    return torch._nested_tensor_from_mask(out, ~padding, mask_check=False)


def _lengths(x: Tensor) -> Tensor:
    """Tokens of each sequence, [batch]."""
    return x._nested_tensor_size()[:, 0].to(x.device)
