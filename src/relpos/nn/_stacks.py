"""Stacks of layers, called like `torch.nn.TransformerEncoder`, `...Decoder` and `torch.nn.Transformer`.

They omit embeddings, absolute positions and the choice of the next token.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.nn._arguments import (
    REQUIRED,
    Required,
    check_caches,
    check_count,
    check_flag,
    check_together,
    sides_of,
)
from relpos.nn._attention import RelativeMultiheadAttention
from relpos.nn._cache import AttentionCache, KeyValueCache, StaticKeyValueCache
from relpos.nn._layers import (
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoderLayer,
    check_self,
)


class RelativeTransformerEncoder(nn.Module):
    """A stack of encoder layers, with an optional norm after the last.

    Args:
        encoder_layer: all layers start as copies of it, weights included, as in
            `torch.nn.TransformerEncoder`.
        num_layers: number of layers.
        norm: applied to the output; layers with norm_first=True need it.
        enable_nested_tensor, mask_check: kept as attributes for code that reads them, and ignored: padding
            is never removed, and outputs at padding are not zeroed. `use_nested_tensor` is False.
    Raises:
        TypeError, ValueError: encoder_layer, norm or num_layers has the wrong type, or num_layers is below 1.
    """

    def __init__(
        self,
        encoder_layer: RelativeTransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__()
        _check_parts("encoder_layer", encoder_layer, RelativeTransformerEncoderLayer, num_layers, norm)
        self.layers = nn.ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm
        self.enable_nested_tensor, self.use_nested_tensor = enable_nested_tensor, False
        self.mask_check = mask_check

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        caches: Sequence[AttentionCache] | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Transform `src`; same shape.

        Args:
            src: [batch, length, d_model] if batch_first, else [length, batch, d_model], or one sequence
                [length, d_model].
            mask: [length, length] or [batch * heads, length, length], bool (True = may not attend) or float.
            src_key_padding_mask: [batch, length], bool (True = padding) or float.
            is_causal: hide the tokens after each token; needs no mask. None means False: torch.nn would look
                whether `mask` is causal, which is not needed here.
            caches: one for each layer, from `make_caches`. `src` is then the next chunk, of any length, and
                masks count all tokens in the cache.
            need_weights: return (output, weights), a tuple with the weights of each layer.
        Raises:
            ValueError, TypeError: as the layers.
        """
        check_caches("caches", caches, self.num_layers)
        names, cache = ("mask", "src_key_padding_mask"), None if caches is None else caches[0]
        check_self(_attention(self), "src", src, names, (mask, src_key_padding_mask), cache)
        x, weights = src, []
        for index, layer in enumerate(self.layers):
            x = layer(
                x,
                mask,
                src_key_padding_mask,
                _flag("is_causal", is_causal),
                cache=None if caches is None else caches[index],
                need_weights=need_weights,
            )
            if need_weights:
                x, found = x
                weights.append(found)
        x = x if self.norm is None else self.norm(x)
        return (x, tuple(weights)) if need_weights else x

    def make_caches(
        self, *, batch: int | None = None, capacity: int | None = None
    ) -> list[KeyValueCache | StaticKeyValueCache]:
        """One empty cache for each layer; see `RelativeMultiheadAttention.make_cache`."""
        return _make_caches(self, batch, capacity)


class RelativeTransformerDecoder(nn.Module):
    """A stack of decoder layers, with an optional norm after the last.

    With caches, decoding computes each token once:

        caches, memory_caches = decoder.make_caches()
        for _ in range(steps):
            states = decoder(embed(tokens[:, -1:]), memory, tgt_is_causal=True,
                             caches=caches, memory_caches=memory_caches)

    In beam search, call `reorder(rows)` on each of them.

    Args:
        decoder_layer: all layers start as copies of it, weights included, as in
            `torch.nn.TransformerDecoder`.
        num_layers: number of layers.
        norm: applied to the output; layers with norm_first=True need it.
    Raises:
        TypeError, ValueError: decoder_layer, norm or num_layers has the wrong type, or num_layers is below 1.
    """

    def __init__(
        self, decoder_layer: RelativeTransformerDecoderLayer, num_layers: int, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        _check_parts("decoder_layer", decoder_layer, RelativeTransformerDecoderLayer, num_layers, norm)
        self.layers = nn.ModuleList(copy.deepcopy(decoder_layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        caches: Sequence[AttentionCache] | None = None,
        memory_caches: Sequence[AttentionCache] | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Transform `tgt`; same shape.

        Args:
            tgt: [batch, length, d_model] if batch_first, else [length, batch, d_model], or one sequence
                [length, d_model].
            memory: the output of the encoder, likewise.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: as in
                `torch.nn.TransformerDecoder`, True = hidden.
            tgt_is_causal: hide the tokens after each token; needs no tgt_mask. None means False.
            memory_is_causal: hide the memory after position i from token i; needs no memory_mask.
            caches, memory_caches: one for each layer, from `make_caches`. `tgt` is then the next chunk, of
                any length, and its masks count all tokens in the cache.
            need_weights: return (output, weights of self-attention, weights of cross-attention), two tuples
                with the weights [batch, heads, query, key] of each layer.
        Raises:
            ValueError, TypeError: as the layers.
        """
        check_caches("caches", caches, self.num_layers)
        check_caches("memory_caches", memory_caches, self.num_layers)
        x, weights, memory_weights = tgt, [], []
        for index, layer in enumerate(self.layers):
            x = layer(
                x,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                _flag("tgt_is_causal", tgt_is_causal),
                memory_is_causal,
                cache=None if caches is None else caches[index],
                memory_cache=None if memory_caches is None else memory_caches[index],
                need_weights=need_weights,
            )
            if need_weights:
                x, found, memory_found = x
                weights.append(found)
                memory_weights.append(memory_found)
        x = x if self.norm is None else self.norm(x)
        return (x, tuple(weights), tuple(memory_weights)) if need_weights else x

    def make_caches(
        self, *, batch: int | None = None, capacity: int | None = None
    ) -> tuple[list[KeyValueCache | StaticKeyValueCache], list[KeyValueCache]]:
        """Two lists of empty caches, one for each layer: for the target, and for the memory.

        Args:
            batch, capacity: make the caches of the target static, see
                `RelativeMultiheadAttention.make_cache`. A cache of the memory is filled once and never grows.
        """
        return _make_caches(self, batch, capacity), [KeyValueCache(is_memory=True) for _ in self.layers]


class RelativeTransformer(nn.Module):
    """An encoder and a decoder that attends to it.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation,
            layer_norm_eps, batch_first, norm_first, bias: as in `torch.nn.Transformer`.
        custom_encoder, custom_decoder: used instead of a new encoder or decoder; their weights stay.
        max_distance: k, or (left, right), in tokens, of all new layers. Required: None means no relative
            positions.
        attention_dropout, activation_dropout, relative_keys, relative_values, relative_per_head, backend: of
            all new layers, as in `RelativeTransformerEncoderLayer`.

    Each new layer has its own random weights, Xavier-uniform as in `torch.nn.Transformer`.

    Raises:
        ValueError, TypeError: as the layers.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
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
        options: Any = {"device": device, "dtype": dtype}
        settings: Any = options | {
            "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout,
            "max_distance": sides_of(self, max_distance),
            "relative_keys": relative_keys,
            "relative_values": relative_values,
            "relative_per_head": relative_per_head,
            "backend": backend,
        }
        shape = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps)
        order = (batch_first, norm_first, bias)
        if custom_encoder is None:
            encoder_layer = RelativeTransformerEncoderLayer(*shape, *order, **settings)
            norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
            self.encoder: nn.Module = RelativeTransformerEncoder(encoder_layer, num_encoder_layers, norm)
            _draw(self.encoder)
        else:
            self.encoder = custom_encoder
        if custom_decoder is None:
            decoder_layer = RelativeTransformerDecoderLayer(*shape, *order, **settings)
            norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, **options)
            self.decoder: nn.Module = RelativeTransformerDecoder(decoder_layer, num_decoder_layers, norm)
            _draw(self.decoder)
        else:
            self.decoder = custom_decoder
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor | tuple[Tensor, ...], ...]:
        """Transform `tgt`; same shape. Arguments as in `torch.nn.Transformer`, True = hidden.

        To decode step by step, call `encoder` once, then `decoder` with caches. With `need_weights`, returns
        (output, weights of the encoder, of the decoder, of its cross-attention), as the stacks do.

        Raises:
            ValueError, TypeError: as the layers.
        """
        check_together("tgt", tgt, "src", src, batch_first=self.batch_first)
        check_flag("need_weights", need_weights)
        # a custom part may not have this argument
        asked = {"need_weights": True} if need_weights else {}
        if need_weights:
            _check_gives_weights("encoder", self.encoder, RelativeTransformerEncoder)
            _check_gives_weights("decoder", self.decoder, RelativeTransformerDecoder)
        memory = self.encoder(
            src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal, **asked
        )
        memory, *weights = memory if need_weights else (memory,)
        out = self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
            **asked,
        )
        return (out[0], *weights, *out[1:]) if need_weights else out

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The causal mask [sz, sz] of `torch.nn.Transformer`: -inf for later tokens, else 0."""
        return nn.Transformer.generate_square_subsequent_mask(sz, device=device, dtype=dtype)


def _check_parts(
    name: str, layer: nn.Module, kind: type[nn.Module], num_layers: int, norm: nn.Module | None
) -> None:
    if not isinstance(layer, kind):
        found = layer.__name__ if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise TypeError(
            f"{name} must be a {kind.__name__}; got {found}. Make a {kind.__name__} with max_distance."
        )
    check_count("num_layers", num_layers)
    if norm is not None and not isinstance(norm, nn.Module):
        raise TypeError(f"norm must be a module or None; got {type(norm).__name__}. Give nn.LayerNorm(...).")


def _check_gives_weights(name: str, part: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(part, kind):
        raise TypeError(
            f"need_weights must be False unless {name} is a {kind.__name__}; got True, and {name} is a "
            f"{type(part).__name__}. Call encoder and decoder one by one."
        )


def _flag(name: str, flag: bool | None) -> bool:
    if flag is not None:
        check_flag(name, flag)
    return bool(flag)


def _attention(stack: RelativeTransformerEncoder | RelativeTransformerDecoder) -> RelativeMultiheadAttention:
    attention = stack.layers[0].self_attn
    assert isinstance(attention, RelativeMultiheadAttention)
    return attention


def _make_caches(
    stack: RelativeTransformerEncoder | RelativeTransformerDecoder, batch: int | None, capacity: int | None
) -> list[KeyValueCache | StaticKeyValueCache]:
    return [_attention(stack).make_cache(batch=batch, capacity=capacity) for _ in stack.layers]


def _draw(stack: nn.Module) -> None:
    """Give each layer, so far a copy, its own random weights and tables."""
    for module in stack.modules():
        if isinstance(module, RelativeMultiheadAttention):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
