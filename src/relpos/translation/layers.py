"""Layers of the translation model, with the submodule names of Marian and BART."""

from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from relpos.translation.attention import RelposAttention
from relpos.translation.config import RelposConfig


class _Layer(GradientCheckpointingLayer):
    """What both kinds of layers have: the feed-forward network, dropout, and norms before or after blocks."""

    def __init__(self, config: RelposConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.activation_fn = ACT2FN[config.activation]
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.norm_first else x

    def _after(self, x: Tensor, block: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(block)
        return x if self.norm_first else norm(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        norm = self.final_layer_norm
        y = self.activation_fn(self.fc1(self._before(x, norm)))
        return self._after(x, self.fc2(self.activation_dropout(y)), norm)


class RelposEncoderLayer(_Layer):
    """Self-attention with relative positions, then a feed-forward network."""

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config)
        self.self_attn = RelposAttention(config, max_distance=config.encoder_max_distance)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, output_attentions: bool = False
    ) -> Tensor:
        """Transform [batch, source, d_model]; `attention_mask` as `key_masks.key_mask` returns it."""
        norm = self.self_attn_layer_norm
        y, _ = self.self_attn(
            self._before(hidden_states, norm),
            attention_mask=attention_mask,
            output_attentions=output_attentions,
        )
        return self._feed_forward(self._after(hidden_states, y, norm))


class RelposDecoderLayer(_Layer):
    """Causal self-attention with relative positions, attention to the source, a feed-forward network."""

    def __init__(self, config: RelposConfig, layer_idx: int) -> None:
        super().__init__(config)
        distance = config.decoder_max_distance
        self.self_attn = RelposAttention(config, max_distance=distance, layer_idx=layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.encoder_attn = RelposAttention(config, max_distance=None, layer_idx=layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        *,
        query_start: int | Tensor = 0,
        is_causal: bool = True,
        output_attentions: bool = False,
    ) -> Tensor:
        """Transform the next chunk [batch, chunk, d_model]; masks as `key_masks.key_mask` returns them.

        Without `encoder_hidden_states` the attention to the source is left out. `query_start` and `is_causal`
        are those of self-attention.
        """
        norm = self.self_attn_layer_norm
        y, _ = self.self_attn(
            self._before(hidden_states, norm),
            cache=cache,
            attention_mask=attention_mask,
            query_start=query_start,
            is_causal=is_causal,
            output_attentions=output_attentions,
        )
        x = self._after(hidden_states, y, norm)
        if encoder_hidden_states is not None:
            norm = self.encoder_attn_layer_norm
            y, _ = self.encoder_attn(
                self._before(x, norm),
                encoder_hidden_states,
                cache,
                encoder_attention_mask,
                output_attentions=output_attentions,
            )
            x = self._after(x, y, norm)
        return self._feed_forward(x)
