"""One encoder and one decoder layer, called like `torch.nn.TransformerEncoderLayer` and `...DecoderLayer`.

Self-attention has relative positions, cross-attention none.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.nn.attention import RelativeMultiheadAttention
from relpos.nn.cache import AttentionCache

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class RelativeTransformerEncoderLayer(nn.Module):
    """Self-attention with relative positions, then a feed-forward network.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias:
            as in `torch.nn.TransformerEncoderLayer`; activation is "relu", "gelu" or "silu".
        attention_dropout, activation_dropout: on the weights, and inside the feed-forward network;
            None means `dropout`.
        max_distance, relative_keys, relative_values, relative_per_head: as in
            `RelativeMultiheadAttention`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        max_distance: int | tuple[int, int] | None = None,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict = {"device": device, "dtype": dtype}
        self.self_attn = RelativeMultiheadAttention(
            d_model,
            nhead,
            dropout if attention_dropout is None else attention_dropout,
            bias,
            batch_first,
            max_distance=max_distance,
            relative_keys=relative_keys,
            relative_values=relative_values,
            relative_per_head=relative_per_head,
            **options,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **options)
        self.activation = _activation(activation)
        self.activation_dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Returns `src` transformed, same shape. Masks as in `torch.nn.TransformerEncoderLayer`."""

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)[0]

        x = _residual(src, attend, self.norm1, self.dropout, self.norm_first)
        return _residual(x, lambda y: _feed_forward(self, y), self.norm2, self.dropout, self.norm_first)


class RelativeTransformerDecoderLayer(nn.Module):
    """Self-attention with relative positions, attention to a memory without, a feed-forward network.

    Args: as `RelativeTransformerEncoderLayer`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        max_distance: int | tuple[int, int] | None = None,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict = {"device": device, "dtype": dtype}
        weights_dropout = dropout if attention_dropout is None else attention_dropout
        self.self_attn = RelativeMultiheadAttention(
            d_model,
            nhead,
            weights_dropout,
            bias,
            batch_first,
            max_distance=max_distance,
            relative_keys=relative_keys,
            relative_values=relative_values,
            relative_per_head=relative_per_head,
            **options,
        )
        self.multihead_attn = RelativeMultiheadAttention(
            d_model, nhead, weights_dropout, bias, batch_first, **options
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **options)
        self.activation = _activation(activation)
        self.activation_dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm3 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        memory_cache: AttentionCache | None = None,
    ) -> Tensor:
        """Returns `tgt` transformed, same shape. Masks as in `torch.nn.TransformerDecoderLayer`.

        With `cache`, `tgt` is the next chunk of the sequence, of any length; `memory_cache` saves
        projecting the memory again.

        Raises:
            ValueError: memory_is_causal together with a cache.
        """
        if memory_is_causal and not (cache is None and memory_cache is None):
            raise ValueError(
                "memory_is_causal cannot be used with a cache, since a chunk may begin anywhere beside the "
                "memory. Give memory_mask."
            )

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(
                x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal, cache=cache
            )[0]

        def attend_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(
                x,
                memory,
                memory,
                memory_key_padding_mask,
                False,
                memory_mask,
                is_causal=memory_is_causal,
                cache=memory_cache,
            )[0]

        x = _residual(tgt, attend, self.norm1, self.dropout, self.norm_first)
        x = _residual(x, attend_memory, self.norm2, self.dropout, self.norm_first)
        return _residual(x, lambda y: _feed_forward(self, y), self.norm3, self.dropout, self.norm_first)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}; got {name!r}.")
    return _ACTIVATIONS[name]


def _feed_forward(
    layer: RelativeTransformerEncoderLayer | RelativeTransformerDecoderLayer, x: Tensor
) -> Tensor:
    return layer.linear2(layer.activation_dropout(layer.activation(layer.linear1(x))))


def _residual(
    x: Tensor, block: Callable[[Tensor], Tensor], norm: nn.Module, dropout: nn.Module, norm_first: bool
) -> Tensor:
    if norm_first:
        return x + dropout(block(norm(x)))
    return norm(x + dropout(block(x)))
