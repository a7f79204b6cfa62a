"""Encoder and decoder layers, called like `torch.nn.TransformerEncoderLayer` and `...DecoderLayer`.

Self-attention has relative positions; cross-attention has none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.nn._arguments import (
    REQUIRED,
    Required,
    check_cache,
    check_count,
    check_flag,
    check_heads,
    check_probability,
    check_sequence,
    check_together,
    sides_of,
)
from relpos.nn._attention import RelativeMultiheadAttention
from relpos.nn._cache import AttentionCache
from relpos.nn._cache_positions import check_memory, chunk_positions
from relpos.nn._masks import check_masks

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class RelativeTransformerEncoderLayer(nn.Module):
    """Self-attention with relative positions, then a feed-forward network.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias:
            as in `torch.nn.TransformerEncoderLayer`; activation is "relu", "gelu", "silu" or a function.
        attention_dropout, activation_dropout: dropout of the attention weights, and inside the feed-forward
            network. None means `dropout`.
        max_distance: k, or (left, right), in tokens; distances beyond share one row. Required: None means no
            relative positions.
        relative_keys, relative_values, relative_per_head, backend: as in `RelativeMultiheadAttention`.

    Submodules have torch's names: `dropout` is the one inside the feed-forward network, and `dropout1` and
    `dropout2` act on the outputs of the two blocks.

    Raises:
        ValueError, TypeError: as `RelativeMultiheadAttention`; or the activation is unknown.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        max_distance: int | tuple[int, int] | Required | None = REQUIRED,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        sides = sides_of(self, max_distance)
        dropouts = _dropouts(dropout, attention_dropout, activation_dropout)
        check_heads(d_model, nhead, width_name="d_model", heads_name="nhead")
        check_count("dim_feedforward", dim_feedforward)
        options: Any = {"device": device, "dtype": dtype}
        self.self_attn = RelativeMultiheadAttention(
            d_model,
            nhead,
            dropouts["attention_dropout"],
            bias,
            batch_first=batch_first,
            max_distance=sides,
            relative_keys=relative_keys,
            relative_values=relative_values,
            relative_per_head=relative_per_head,
            backend=backend,
            **options,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **options)
        self.activation = _activation(activation)
        self.dropout = nn.Dropout(dropouts["activation_dropout"])
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Transform `src`; same shape. Masks as in `torch.nn.TransformerEncoderLayer`.

        With `cache`, `src` is the next chunk of the sequence, of any length, as in a causal language model or
        a streaming encoder. With `need_weights`, returns (output, weights), the weights of
        `RelativeMultiheadAttention` for each head, [batch, heads, query, key].

        Raises:
            ValueError, TypeError: as `RelativeMultiheadAttention`, with the argument names of this method.
        """
        names = ("src_mask", "src_key_padding_mask")
        check_self(self.self_attn, "src", src, names, (src_mask, src_key_padding_mask), cache)
        check_flag("is_causal", is_causal)
        check_flag("need_weights", need_weights)
        weights: list[Tensor] = []

        def attend(x: Tensor) -> Tensor:
            out, found = self.self_attn(
                x, x, x, src_key_padding_mask, need_weights, src_mask, False, is_causal, cache=cache
            )
            weights.append(found)
            return out

        x = _residual(src, attend, self.norm1, self.dropout1, self.norm_first)
        x = _residual(x, lambda y: _feed_forward(self, y), self.norm2, self.dropout2, self.norm_first)
        return (x, weights[0]) if need_weights else x


class RelativeTransformerDecoderLayer(nn.Module):
    """Self-attention with relative positions, cross-attention without, then a feed-forward network.

    Args: as `RelativeTransformerEncoderLayer`. max_distance affects self-attention only, backend both.
    Raises:
        ValueError, TypeError: as `RelativeTransformerEncoderLayer`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        max_distance: int | tuple[int, int] | Required | None = REQUIRED,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        sides = sides_of(self, max_distance)
        dropouts = _dropouts(dropout, attention_dropout, activation_dropout)
        check_heads(d_model, nhead, width_name="d_model", heads_name="nhead")
        check_count("dim_feedforward", dim_feedforward)
        options: Any = {"device": device, "dtype": dtype}
        weights_dropout = dropouts["attention_dropout"]
        self.self_attn = RelativeMultiheadAttention(
            d_model,
            nhead,
            weights_dropout,
            bias,
            batch_first=batch_first,
            max_distance=sides,
            relative_keys=relative_keys,
            relative_values=relative_values,
            relative_per_head=relative_per_head,
            backend=backend,
            **options,
        )
        self.multihead_attn = RelativeMultiheadAttention(
            d_model,
            nhead,
            weights_dropout,
            bias,
            batch_first=batch_first,
            max_distance=None,
            backend=backend,
            **options,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **options)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **options)
        self.activation = _activation(activation)
        self.dropout = nn.Dropout(dropouts["activation_dropout"])
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.norm3 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
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
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Transform `tgt`; same shape. Masks as in `torch.nn.TransformerDecoderLayer`.

        With `cache`, `tgt` is the next chunk of the sequence, of any length. `memory_cache` keeps the
        projected memory for later steps. With `need_weights`, returns (output, weights of self-attention,
        weights of cross-attention), both [batch, heads, query, key].

        Raises:
            ValueError, TypeError: as `RelativeMultiheadAttention`, with the argument names of this method;
                or memory_is_causal is used with a cache.
        """
        names = ("tgt_mask", "tgt_key_padding_mask")
        check_self(self.self_attn, "tgt", tgt, names, (tgt_mask, tgt_key_padding_mask), cache)
        self._check(tgt, memory, tgt_is_causal, memory_is_causal, cache, memory_cache)
        check_flag("need_weights", need_weights)
        check_masks(
            ("memory_mask", "memory_key_padding_mask"),
            (memory_mask, memory_key_padding_mask),
            query=tgt,
            batch_first=self.multihead_attn.batch_first,
            num_heads=self.multihead_attn.num_heads,
            num_keys=chunk_positions(memory_cache, self.multihead_attn.num_tokens(memory)).num_keys,
            has_cache=memory_cache is not None,
        )

        weights: list[Tensor] = []

        def attend(x: Tensor) -> Tensor:
            out, found = self.self_attn(
                x, x, x, tgt_key_padding_mask, need_weights, tgt_mask, False, tgt_is_causal, cache=cache
            )
            weights.append(found)
            return out

        def attend_memory(x: Tensor) -> Tensor:
            out, found = self.multihead_attn(
                x,
                memory,
                memory,
                memory_key_padding_mask,
                need_weights,
                memory_mask,
                False,
                memory_is_causal,
                cache=memory_cache,
            )
            weights.append(found)
            return out

        x = _residual(tgt, attend, self.norm1, self.dropout1, self.norm_first)
        x = _residual(x, attend_memory, self.norm2, self.dropout2, self.norm_first)
        x = _residual(x, lambda y: _feed_forward(self, y), self.norm3, self.dropout3, self.norm_first)
        return (x, weights[0], weights[1]) if need_weights else x

    def _check(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_is_causal: bool,
        memory_is_causal: bool,
        cache: AttentionCache | None,
        memory_cache: AttentionCache | None,
    ) -> None:
        attention = self.multihead_attn
        _check_tokens(attention, "memory", memory)
        check_flag("tgt_is_causal", tgt_is_causal)
        check_flag("memory_is_causal", memory_is_causal)
        check_cache("memory_cache", memory_cache)
        if memory_cache is not None and memory_cache is cache:
            raise ValueError(
                "memory_cache must be a cache of its own; got the cache of self-attention. "
                "Give KeyValueCache(is_memory=True)."
            )
        check_memory("memory", attention.num_tokens(memory), "memory_cache", memory_cache)
        # a filled memory cache replaces the memory
        if memory_cache is None or memory_cache.filled_memory() is None:
            check_together("memory", memory, "tgt", tgt, batch_first=attention.batch_first)
        if memory_is_causal and not (cache is None and memory_cache is None):
            raise ValueError(
                "memory_is_causal cannot be used with a cache, which does not know the position of the chunk "
                "in the memory. Give memory_mask."
            )


def check_self(
    attention: RelativeMultiheadAttention,
    name: str,
    x: Tensor,
    mask_names: tuple[str, str],
    masks: tuple[Tensor | None, Tensor | None],
    cache: AttentionCache | None,
) -> None:
    """Refuse tokens, masks and caches that do not fit, with the caller's names for them."""
    _check_tokens(attention, name, x)
    check_cache("cache", cache)
    check_masks(
        mask_names,
        masks,
        query=x,
        batch_first=attention.batch_first,
        num_heads=attention.num_heads,
        num_keys=chunk_positions(cache, attention.num_tokens(x)).num_keys,
        has_cache=cache is not None,
    )


def _check_tokens(attention: RelativeMultiheadAttention, name: str, x: Tensor) -> None:
    weight, width = attention.any_weight, attention.embed_dim
    check_sequence(name, x, weight, width=width, width_name="d_model", batch_first=attention.batch_first)


def _dropouts(
    dropout: float, attention_dropout: float | None, activation_dropout: float | None
) -> dict[str, float]:
    given = {
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "activation_dropout": activation_dropout,
    }
    filled = {name: dropout if p is None else p for name, p in given.items()}
    for name, p in filled.items():
        check_probability(name, p)
    return filled


def _activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(_ACTIVATIONS)} or a function; got {activation!r}. "
                "Give the function itself."
            )
        return _ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(
            f"activation must be one of {sorted(_ACTIVATIONS)} or a function; got "
            f"{type(activation).__name__}. Give one of these."
        )
    return activation


def _feed_forward(
    layer: RelativeTransformerEncoderLayer | RelativeTransformerDecoderLayer, x: Tensor
) -> Tensor:
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))


def _residual(
    x: Tensor, block: Callable[[Tensor], Tensor], norm: nn.Module, dropout: nn.Module, norm_first: bool
) -> Tensor:
    if norm_first:
        return x + dropout(block(norm(x)))
    return norm(x + dropout(block(x)))
