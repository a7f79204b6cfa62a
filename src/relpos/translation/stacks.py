"""Encoder and decoder of the translation model, as models of transformers."""

import math
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from relpos.translation.arguments import check_one_input, refuse_unknown, resolve_use_cache
from relpos.translation.attention import RelposAttention, cached_length
from relpos.translation.config import RelposConfig
from relpos.translation.key_masks import check_key_mask, key_mask
from relpos.translation.layers import RelposDecoderLayer, RelposEncoderLayer
from relpos.translation.positions import add_positions, position_ids
from relpos.translation.pretrained import RelposPreTrainedModel


class _Stack(RelposPreTrainedModel):
    """Embeddings, layers and the norm after them."""

    def __init__(self, config: RelposConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.scale, self.absolute = math.sqrt(config.d_model), config.absolute_positions
        is_learned = self.absolute == "learned"
        self.embed_positions = nn.Embedding(config.max_positions, config.d_model) if is_learned else None
        self.dropout = nn.Dropout(config.dropout)
        is_needed = config.norm_first
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if is_needed else nn.Identity()
        self.gradient_checkpointing = False

    def _embedded(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Tensor | None,
        start: int | Tensor = 0,
    ) -> Tensor:
        """Embeddings times sqrt(d_model), with absolute positions, [batch, length, d_model]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_tokens(input_ids)
        x = inputs_embeds * self.scale
        if self.absolute != "none":
            batch, length = x.shape[:2]
            places = position_ids(mask, batch=batch, length=length, start=start, device=x.device)
            x = add_positions(x, self.embed_positions, places)
        return self.dropout(x)

    def _wants_weights(self, given: dict[str, Any]) -> bool:
        asked = given.get("output_attentions")
        return bool(self.config.output_attentions if asked is None else asked)


class RelposEncoder(_Stack):
    """The encoder: embeddings and self-attention layers."""

    _can_record_outputs = {"hidden_states": RelposEncoderLayer, "attentions": RelposAttention}  # noqa: RUF012

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList(RelposEncoderLayer(config) for _ in range(config.encoder_layers))
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode a batch of sources.

        Args:
            input_ids: [batch, source]; or inputs_embeds, [batch, source, d_model], rows of the embeddings.
            attention_mask: [batch, source], 1 for tokens and 0 for padding, on either side; or [batch,
                heads or 1, source, source], bool or integer, 1 = may attend, or float, added to the logits.
            kwargs: output_attentions, output_hidden_states, return_dict, as in transformers; their defaults
                are in the config. Any other must be None.
        Raises:
            ValueError: both inputs or none are given; a mask has a wrong size. TypeError: unknown argument.
        """
        # a Trainer gives them to generate, which passes them on; they have no effect here
        kwargs.pop("labels", None)
        refuse_unknown(kwargs)
        check_one_input("input_ids", input_ids, "inputs_embeds", inputs_embeds)
        x = self._embedded(input_ids, inputs_embeds, attention_mask)
        batch, length = x.shape[:2]
        check_key_mask(
            "attention_mask", attention_mask, batch=batch, num_queries=length, num_keys=length, is_source=True
        )
        mask = key_mask(attention_mask)
        weights = self._wants_weights(kwargs)
        for layer in self.layers:
            x = layer(x, mask, output_attentions=weights)
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))


class RelposDecoder(_Stack):
    """The decoder: embeddings, causal self-attention, attention to the source."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": RelposDecoderLayer,
        "attentions": OutputRecorder(RelposAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(RelposAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config, config.decoder_vocab_size)
        self.layers = nn.ModuleList(RelposDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.post_init()

    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the next chunk of each target, of any length.

        Args:
            input_ids: [batch, chunk]; or inputs_embeds, [batch, chunk, d_model], rows of the embeddings.
            attention_mask: [batch, target], 1 for tokens and 0 for padding, cached tokens included; or
                [batch, heads or 1, chunk, target], which then says alone who attends to whom.
            encoder_hidden_states: [batch, source, d_model]; None for a decoder without a source.
            encoder_attention_mask: [batch, source]; or [batch, heads or 1, chunk, source].
            cache: keys and values of earlier chunks; this chunk's are appended. An EncoderDecoderCache
                keeps those of the source too. `past_key_values` is its older name.
            use_cache: whether to make a cache if none is given. By default the config says it, and no cache
                is made for training.
            kwargs: as in the encoder.
        Raises:
            ValueError: both inputs or none are given; a mask has a wrong size; a cache with use_cache=False.
            TypeError: unknown argument.
        """
        refuse_unknown(kwargs)
        check_one_input("input_ids", input_ids, "inputs_embeds", inputs_embeds)
        if resolve_use_cache(self, use_cache, cache) and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        start = cached_length(cache)
        x = self._embedded(input_ids, inputs_embeds, attention_mask, start)
        batch, chunk = x.shape[:2]
        end = None if isinstance(start, Tensor) else start + chunk
        sizes: dict[str, Any] = {"batch": batch, "num_queries": chunk}
        check_key_mask("attention_mask", attention_mask, num_keys=end, is_source=False, **sizes)
        if encoder_hidden_states is not None:
            source = encoder_hidden_states.shape[1]
            name = "encoder_attention_mask"
            check_key_mask(name, encoder_attention_mask, num_keys=source, is_source=True, **sizes)
        mask, memory_mask = key_mask(attention_mask), key_mask(encoder_attention_mask)
        is_whole = attention_mask is not None and attention_mask.dim() == 4
        weights = self._wants_weights(kwargs)
        for layer in self.layers:
            x = layer(
                x,
                mask,
                encoder_hidden_states,
                memory_mask,
                cache=cache,
                query_start=start,
                is_causal=not is_whole,
                output_attentions=weights,
            )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.layer_norm(x), cache=cache)
