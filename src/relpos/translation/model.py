"""The translation model: the paper's encoder-decoder as a model of transformers.

With the output layer, which scores subwords, and without. Text is handled elsewhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, Cache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple
from typing_extensions import Unpack

from relpos.translation.arguments import check_labels, check_one_input, refuse_unknown
from relpos.translation.attention import cached_length
from relpos.translation.config import RelposConfig
from relpos.translation.key_masks import check_key_mask, seen_by_any
from relpos.translation.old_formats import convert_weights, is_first_format
from relpos.translation.pretrained import RelposPreTrainedModel
from relpos.translation.stacks import RelposDecoder, RelposEncoder


class RelposModel(RelposPreTrainedModel):
    """Encoder and decoder, without the layer that scores subwords: the model of `AutoModel`."""

    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config)
        if config.target_vocab_size is None:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
        else:
            self._tied_weights_keys = {}
        self.encoder = RelposEncoder(config)
        self.decoder = RelposDecoder(config)
        self.post_init()

    def _tied_names(self) -> dict[str, str]:
        return dict(self._tied_weights_keys)

    def get_encoder(self, modality: str | None = None) -> RelposEncoder:
        """The encoder, as `generate` asks for it."""
        return self.encoder

    def get_decoder(self) -> RelposDecoder:
        """The decoder."""
        return self.decoder

    def get_input_embeddings(self) -> nn.Embedding:
        """The subword embeddings of the source, which are those of the target with one vocabulary."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        """Replace the subword embeddings of the source, and of the target with one vocabulary."""
        self.encoder.embed_tokens = value
        if self.config.target_vocab_size is None:
            self.shared = self.decoder.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """The decoder's states. Arguments: as in `RelposForConditionalGeneration`.

        Returns:
            last_hidden_state [batch, chunk, d_model], and what else was asked for.
        """
        refuse_unknown(kwargs)
        asked = {name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")}
        asked = {name: value for name, value in asked.items() if value is not None} | {"return_dict": True}
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        given = ("decoder_input_ids", decoder_input_ids, "decoder_inputs_embeds", decoder_inputs_embeds)
        check_one_input(*given)
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds, **asked)
        elif input_ids is not None or inputs_embeds is not None:
            raise ValueError(
                "encoder_outputs must be None where input_ids or inputs_embeds is given; got both. Give one."
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs[:3])
        assert target is not None
        _check_masks(encoded[0], attention_mask, target, decoder_attention_mask, cache)
        out = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoded.last_hidden_state,
            seen_by_any(attention_mask),
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **asked,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=out.last_hidden_state,
            cache=out.cache,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


def _check_masks(
    source: Tensor,
    source_mask: Tensor | None,
    target: Tensor,
    target_mask: Tensor | None,
    cache: Cache | None,
) -> None:
    """Refuse masks by the names that they have here; encoder and decoder have others."""
    batch, length = source.shape[:2]
    sizes: dict[str, Any] = {"batch": batch, "num_queries": length, "num_keys": length}
    check_key_mask("attention_mask", source_mask, is_source=True, **sizes)
    if target_mask is None:
        return
    start, chunk = cached_length(cache), target.shape[1]
    sizes = {"batch": target.shape[0], "num_queries": chunk}
    sizes["num_keys"] = None if isinstance(start, Tensor) else start + chunk
    check_key_mask("decoder_attention_mask", target_mask, is_source=False, **sizes)


class RelposForConditionalGeneration(RelposPreTrainedModel, GenerationMixin):
    """The translation model: encoder, decoder, and a layer that scores every subword.

    Has `from_pretrained`, `save_pretrained` and `generate` of transformers. `import relpos.translation`
    registers it with `AutoModelForSeq2SeqLM`, and `RelposModel` with `AutoModel`.
    """

    # makes transformers' Trainer pass num_items_in_batch
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}  # noqa: RUF012

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config)
        self.model = RelposModel(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=config.output_bias)
        if config.target_vocab_size is not None:
            self._tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
        self.post_init()

    def _tied_names(self) -> dict[str, str]:
        return dict(self._tied_weights_keys) if self.config.tie_word_embeddings else {}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights by name, as in torch; those of an older format are converted."""
        if is_first_format(state_dict):
            state_dict = convert_weights(dict(state_dict))
        return super().load_state_dict(state_dict, strict, assign)

    def get_encoder(self, modality: str | None = None) -> RelposEncoder:
        """The encoder, as `generate` asks for it."""
        return self.model.encoder

    def get_decoder(self) -> RelposDecoder:
        """The decoder."""
        return self.model.decoder

    def get_input_embeddings(self) -> nn.Embedding:
        """The subword embeddings of the source, which are those of the target with one vocabulary."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        """Replace the subword embeddings of the source, and of the target with one vocabulary."""
        self.model.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *arguments: Any, **options: Any
    ) -> Any:
        """Give the vocabulary this many subwords: that of the source, if the target has one of its own.

        Arguments: as in transformers. Entries of a bias that are new are 0.
        """
        if self.config.target_vocab_size is not None:
            # the output layer belongs to the target
            return self.model.resize_token_embeddings(new_num_tokens, *arguments, **options)
        return super().resize_token_embeddings(new_num_tokens, *arguments, **options)

    def create_masks_for_generate(self, *, attention_mask: Tensor | None, **arguments: Any) -> Tensor | None:
        """The mask [batch, target] for a static cache, of its whole capacity, so that shapes stay the same.

        Attention takes from the cache which keys exist.
        """
        cache = arguments.get("cache")
        if attention_mask is None or cache is None:
            return attention_mask
        rest = cache.get_max_length() - attention_mask.shape[-1]
        return F.pad(attention_mask, (0, rest), value=1) if rest > 0 else attention_mask

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels [batch, target] shifted right by one; the start token precedes the first real label."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        assert start is not None
        assert padding is not None
        shifted = F.pad(labels[:, :-1], (1, 0), value=-100)
        is_real = labels != -100
        # a row without labels begins with the start token
        is_first = (is_real.cumsum(1) == 1) & is_real
        is_first[:, 0] |= ~is_real.any(1)
        shifted = shifted.masked_fill(is_first, start)
        return shifted.masked_fill(shifted == -100, padding)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Score the next subword after every target token.

        Args:
            input_ids: [batch, source]; or inputs_embeds, [batch, source, d_model], rows of the embeddings.
            attention_mask: [batch, source], 1 for tokens, 0 for padding.
            decoder_input_ids: [batch, chunk], the next tokens of the target; or decoder_inputs_embeds,
                [batch, chunk, d_model]. Default: from labels.
            decoder_attention_mask: [batch, target], cached tokens included; or [batch, heads or 1, chunk,
                target], which then says alone who attends to whom. Default with labels: padding before the
                start token is masked.
            encoder_outputs: output of the encoder, instead of input_ids.
            cache: keys and values of earlier chunks; returned with those of this chunk appended.
                `past_key_values` is its older name.
            labels: [batch, target]; -100, on either side, is ignored in the loss.
            use_cache: whether to make a cache if none is given. By default the config says it, and no cache
                is made for training or with labels.
            kwargs: num_items_in_batch, the divisor of the summed loss, by default the number of labels;
                output_attentions, output_hidden_states, return_dict, as in transformers; their defaults
                are in the config. Any other must be None.
        Returns:
            logits [batch, chunk, target vocabulary]; loss in nats per token if labels are given.
        Raises:
            ValueError: source or target is missing or given twice; a mask has a wrong size; labels are out of
                the vocabulary; a cache with use_cache=False. TypeError: an argument is unknown.
        """
        if encoder_outputs is None:
            check_one_input("input_ids", input_ids, "inputs_embeds", inputs_embeds)
        if labels is not None:
            check_labels(labels, self.config.decoder_vocab_size)
            use_cache = False if cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            if decoder_attention_mask is None and decoder_input_ids is not None:
                decoder_attention_mask = self._left_padding_mask(decoder_input_ids)
        out = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs | {"return_dict": True},
        )
        logits = self.lm_head(out.last_hidden_state)
        return Seq2SeqLMOutput(
            loss=None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch")),
            logits=logits,
            **{name: value for name, value in out.items() if name != "last_hidden_state"},
        )

    def _left_padding_mask(self, decoder_input_ids: Tensor) -> Tensor | None:
        """The mask [batch, target] that hides padding before the start token; None if there is no padding."""
        padding = self.config.pad_token_id
        if padding is None or padding == self.config.decoder_start_token_id:
            return None
        # a compiled graph cannot branch on data, and always gets the mask
        if not torch.compiler.is_compiling() and not bool((decoder_input_ids[:, :1] == padding).any()):
            return None
        return ((decoder_input_ids != padding).cumsum(1) > 0).long()

    def _loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        smoothing = self.config.label_smoothing if self.training else 0.0
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten().long(), reduction="sum", label_smoothing=smoothing
        )
        count = (labels != -100).sum().clamp(min=1) if num_items is None else num_items
        return total / count


AutoConfig.register("relpos", RelposConfig)
AutoModel.register(RelposConfig, RelposModel)
AutoModelForSeq2SeqLM.register(RelposConfig, RelposForConditionalGeneration)
