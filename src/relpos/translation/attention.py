"""Attention of the translation model, with the names of Marian's and BART's projections.

Tables of relative positions; and positions of queries among cached keys.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, EncoderDecoderCache

from relpos.nn import AttentionCore
from relpos.translation.config import RelposConfig

# "relpos" runs the fused backends, "eager" computes all weights, "sdpa" is torch's fused attention
IMPLEMENTATIONS = ("relpos", "eager", "sdpa")


class RelposAttention(nn.Module):
    """Multi-head attention; self-attention has relative positions, attention to the source has none.

    Args:
        config: sizes, dropout, and which tables there are.
        max_distance: clip distances (left, right), tokens; None for no relative positions.
        layer_idx: index of the layer in a cache.
    """

    relative_position_keys: nn.Parameter | None
    relative_position_values: nn.Parameter | None

    def __init__(
        self, config: RelposConfig, *, max_distance: tuple[int, int] | None, layer_idx: int = 0
    ) -> None:
        super().__init__()
        self.config, self.max_distance, self.layer_idx = config, max_distance, layer_idx
        self.num_heads, self.head_dim = config.num_heads, config.d_model // config.num_heads
        self.dropout, self.is_tied = config.attention_dropout, config.relative_tied
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)
        self.core = AttentionCore()
        has_keys, has_values = config.relative_keys, config.relative_values and not config.relative_tied
        for name, is_wanted in (("keys", has_keys), ("values", has_values)):
            self.register_parameter(f"relative_position_{name}", self._table() if is_wanted else None)

    def _table(self) -> nn.Parameter | None:
        if self.max_distance is None:
            return None
        rows = sum(self.max_distance) + 1
        heads = (self.num_heads,) if self.config.relative_per_head else ()
        return nn.Parameter(torch.empty(*heads, rows, self.head_dim))

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        *,
        query_start: int | Tensor = 0,
        is_causal: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `hidden_states` to themselves and the cache, or to `key_value_states`.

        Args:
            hidden_states: [batch, query, d_model]. key_value_states: the source, [batch, key, d_model].
            attention_mask: as `key_masks.key_mask` returns it.
            query_start: position of the first query, tokens: an integer, or a tensor [] under torch.compile.
        Returns:
            [batch, query, d_model], and the weights [batch, heads, query, key] if they are asked for; with a
            static cache they have a column for each key that it has room for.
        """
        query = self._heads(self.q_proj(hidden_states))
        key, value = self._keys_and_values(hidden_states, key_value_states, cache)
        limits: dict[str, Any] = {"query_start": 0}
        room = 0
        if key_value_states is not None:
            # a static cache may be longer than the source
            key, value = (x[:, :, : key_value_states.shape[1]] for x in (key, value))
        else:
            room = key.shape[2]
            key, value, limits = _filled(key, value, query_start, hidden_states.shape[1])
        if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:
            attention_mask = attention_mask[..., : key.shape[2]]
        limits |= {"attn_mask": attention_mask, "is_causal": is_causal}
        limits["dropout_p"] = self.dropout if self.training else 0.0
        kind = self.config._attn_implementation
        if kind == "sdpa" and not output_attentions:
            out, weights = _plain_attention(query, key, value, **limits), None
        else:
            rel_k, rel_v = self.relative_position_keys, self.relative_position_values
            out, weights = self.core(
                query,
                key,
                value,
                rel_k,
                rel_k if self.is_tied else rel_v,
                max_distance=None if rel_k is None and rel_v is None else self.max_distance,
                need_weights=output_attentions or kind == "eager",
                **limits,
            )
        if weights is not None and weights.shape[-1] < room:
            # zeros for the unused places of a static cache, as under torch.compile
            weights = F.pad(weights, (0, room - weights.shape[-1]))
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] to [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _keys_and_values(
        self, hidden_states: Tensor, memory: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache and of this chunk; those of the source are projected once."""
        side: Any = cache
        if isinstance(cache, EncoderDecoderCache):
            side = cache.self_attention_cache if memory is None else cache.cross_attention_cache
            if memory is not None and cache.is_updated.get(self.layer_idx):
                layer = side.layers[self.layer_idx]
                return layer.keys, layer.values
        elif memory is not None:
            # a cache of one side is that of self-attention
            side = None
        states = hidden_states if memory is None else memory
        key, value = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        if side is None:
            return key, value
        if isinstance(cache, EncoderDecoderCache) and memory is not None:
            cache.is_updated[self.layer_idx] = True
        return side.update(key, value, self.layer_idx)


def _filled(
    key: Tensor, value: Tensor, start: int | Tensor, chunk: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values without the unused places of a static cache, and the limits of the call.

    Under torch.compile keys keep their shape, so that one graph serves all positions.
    """
    if isinstance(start, Tensor):
        batch = key.shape[0]
        lengths = (start + chunk).expand(batch)
        return key, value, {"query_start": start.expand(batch), "key_lengths": lengths}
    end = start + chunk
    if key.shape[2] != end:
        key, value = key[:, :, :end], value[:, :, :end]
    return key, value, {"query_start": start}


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_start: int | Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention, which places causal queries at the first keys."""
    length, keys = query.shape[2], key.shape[2]
    if is_causal and attn_mask is None and length == keys:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)
    if is_causal:
        start = torch.as_tensor(query_start, device=query.device).reshape(-1, 1, 1, 1)
        at = torch.arange(length, device=query.device)[:, None] + start
        allowed = torch.arange(keys, device=query.device) <= at
        if attn_mask is None:
            attn_mask = allowed
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & allowed
        else:
            attn_mask = attn_mask.masked_fill(~allowed, float("-inf"))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p)


def cached_length(cache: Cache | None) -> int | Tensor:
    """Number of tokens in the cache: the position of the next. A tensor [] for a compiled static cache."""
    length = 0 if cache is None else cache.get_seq_length()
    if not isinstance(length, Tensor):
        return length
    # a copy, since the cache counts in place
    return length.clone() if torch.compiler.is_compiling() else int(length)
