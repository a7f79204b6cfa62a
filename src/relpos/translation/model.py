"""The translation model: the paper's encoder-decoder as a transformers model.

Absolute positions are added to the embeddings; relative positions are in the layers (`relpos.nn`). Text is
handled elsewhere.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from relpos.nn import (
    AttentionCache,
    RelativeMultiheadAttention,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoderLayer,
)
from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError
from relpos.translation.generation_settings import read_generation_settings
from relpos.translation.model_folders import config_settings, local_folder, read_config
from relpos.translation.weights import check_fit, read_header, read_weights


class RelposPreTrainedModel(PreTrainedModel):
    """Base of encoder, decoder and model: configuration class and initial weights."""

    config_class = RelposConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _no_split_modules = ["RelativeTransformerEncoderLayer", "RelativeTransformerDecoderLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RelativeMultiheadAttention):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


class TooLongError(InputError, ValueError):
    """A sequence is longer than the table of learned positions. A command prints it as one line."""


class _Embedding(nn.Module):
    """Subwords times sqrt(d_model), plus absolute positions if the configuration has any."""

    def __init__(self, config: RelposConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model)
        self.absolute = config.absolute_positions
        self.dropout = nn.Dropout(config.dropout)
        if self.absolute == "learned":
            self.positions = nn.Embedding(config.max_positions, config.d_model)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[batch, length] ids and positions to [batch, length, d_model]."""
        x = self.tokens(input_ids) * self.scale
        if self.absolute == "sinusoidal":
            x = x + sinusoids(position_ids, x.shape[-1]).to(x.dtype)
        elif self.absolute == "learned":
            last = self.positions.num_embeddings
            if not torch.compiler.is_compiling() and position_ids.numel() and int(position_ids.max()) >= last:
                raise TooLongError(
                    f"positions must be below max_positions = {last}, since they are learned; got position "
                    f"{int(position_ids.max())}. Shorten the input, or train with relative positions."
                )
            x = x + self.positions(position_ids)
        return self.dropout(x)


def sinusoids(position_ids: Tensor, d_model: int) -> Tensor:
    """The sine and cosine of each position, [..., d_model], float32.

    Source: Vaswani et al. 2017, section 3.5; sines first, then cosines, as in tensor2tensor.
    """
    half = (d_model + 1) // 2
    exponent = torch.arange(half, device=position_ids.device, dtype=torch.float32) / max(half - 1, 1)
    angle = position_ids[..., None].float() * torch.exp(exponent * -math.log(10_000.0))
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[..., :d_model]


def _layer_settings(config: RelposConfig) -> dict[str, Any]:
    return {
        "d_model": config.d_model,
        "nhead": config.num_heads,
        "dim_feedforward": config.d_ff,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "activation": config.activation,
        "norm_first": config.norm_first,
        "batch_first": True,
        "relative_keys": config.relative_keys,
        "relative_values": config.relative_values,
        "relative_per_head": config.relative_per_head,
    }


class RelposEncoder(RelposPreTrainedModel):
    """The encoder: embeddings and self-attention layers."""

    def __init__(self, config: RelposConfig, tokens: nn.Embedding | None = None) -> None:
        super().__init__(config)
        tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens is None else tokens
        self.embedding = _Embedding(config, tokens)
        settings = _layer_settings(config) | {"max_distance": config.encoder_max_distance}
        self.layers = nn.ModuleList(
            RelativeTransformerEncoderLayer(**settings) for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(config.d_model) if config.norm_first else nn.Identity()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Encode [batch, source] ids; `attention_mask` is 1 for tokens and 0 for padding, on either side.

        The other arguments are passed by `generate`; see `_check_outputs`.
        """
        _check_outputs(output_attentions, output_hidden_states, return_dict)
        x = self.embedding(input_ids, _positions(input_ids, attention_mask))
        padding = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class RelposDecoder(RelposPreTrainedModel):
    """The decoder: embeddings, causal self-attention, attention to the source."""

    def __init__(self, config: RelposConfig, tokens: nn.Embedding | None = None) -> None:
        super().__init__(config)
        tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens is None else tokens
        self.embedding = _Embedding(config, tokens)
        settings = _layer_settings(config) | {"max_distance": config.decoder_max_distance}
        self.layers = nn.ModuleList(
            RelativeTransformerDecoderLayer(**settings) for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.d_model) if config.norm_first else nn.Identity()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
    ) -> Tensor:
        """Decode the next chunk [batch, chunk], of any length, to states [batch, chunk, d_model].

        `attention_mask` [batch, target] covers the cached tokens too.
        """
        start = 0 if cache is None else int(cache.get_seq_length())
        chunk = input_ids.shape[1]
        positions = _positions(input_ids, attention_mask, start=start)
        hidden = None if attention_mask is None else attention_mask[:, : start + chunk] == 0
        memory_hidden = None if memory_mask is None else memory_mask == 0
        x = self.embedding(input_ids, positions)
        for index, layer in enumerate(self.layers):
            x = layer(
                x,
                memory,
                tgt_key_padding_mask=hidden,
                memory_key_padding_mask=memory_hidden,
                tgt_is_causal=True,
                cache=_layer_cache(cache, index, is_memory=False),
                memory_cache=_layer_cache(cache, index, is_memory=True),
            )
        return self.norm(x)


def _layer_cache(cache: EncoderDecoderCache | None, index: int, *, is_memory: bool) -> AttentionCache | None:
    return None if cache is None else _LayerCache(cache, index, is_memory=is_memory)


class _LayerCache:
    """A `relpos.nn.AttentionCache` over one layer of a transformers cache, which transformers reorders."""

    def __init__(self, cache: EncoderDecoderCache, index: int, *, is_memory: bool) -> None:
        self.is_memory = is_memory
        self._cache, self._index = cache, index
        self._side = cache.cross_attention_cache if is_memory else cache.self_attention_cache

    @property
    def length(self) -> int:
        return int(self._side.get_seq_length(self._index))

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        if not self.is_memory or not self._cache.is_updated.get(self._index):
            return None
        layer: Any = self._side.layers[self._index]
        return layer.keys, layer.values

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_memory:
            self._cache.is_updated[self._index] = True
        return self._side.update(key, value, self._index)


def _positions(input_ids: Tensor, attention_mask: Tensor | None, *, start: int = 0) -> Tensor:
    """Position of each token of this chunk, counted from the first token that is not padding."""
    chunk = input_ids.shape[1]
    if attention_mask is None or attention_mask.dim() != 2:
        return torch.arange(start, start + chunk, device=input_ids.device).expand(len(input_ids), -1)
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, start : start + chunk]


def _check_outputs(
    output_attentions: bool | None, output_hidden_states: bool | None, return_dict: bool | None
) -> None:
    """Refuse outputs that other models of transformers have, and this one does not. Raises: TypeError."""
    if output_attentions:
        raise TypeError(
            "output_attentions must be False, since attention is not among the outputs; got "
            f"{output_attentions!r}. Use relpos.inspection.observe."
        )
    if output_hidden_states:
        raise TypeError(
            "output_hidden_states must be False, since they are not among the outputs; got "
            f"{output_hidden_states!r}. Read them with a forward hook on the layers."
        )
    if return_dict is False:
        raise TypeError(
            "return_dict must be True, since outputs have names; got False. Call .to_tuple() on them."
        )


class RelposForConditionalGeneration(RelposPreTrainedModel, GenerationMixin):
    """The translation model: encoder, decoder, and a layer that scores every subword.

    Has `from_pretrained`, `save_pretrained` and `generate` of transformers, and is registered with
    `AutoModelForSeq2SeqLM` when `relpos.translation.model` is imported.
    """

    # makes transformers' Trainer pass num_items_in_batch
    accepts_loss_kwargs = True
    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embedding.tokens.weight": "shared.weight",
        "decoder.embedding.tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }

    def __init__(self, config: RelposConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = RelposEncoder(config, self.shared)
        self.decoder = RelposDecoder(config, self.shared)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: RelposConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model from a folder or the Hugging Face Hub; safe for untrusted models.

        Checks every file before it builds the model: types and bounds of all settings, shapes against the
        header of the weights, weights for NaN. Reads safetensors only. Arguments: as in transformers.

        Raises:
            ModelFolderError: a file cannot be used; the message is one sentence. Also a ValueError.
        """
        name = pretrained_model_name_or_path
        if name is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(name, *model_args, config=config, **kwargs)
        folder = local_folder(name, kwargs)
        if not isinstance(config, RelposConfig):
            changed = config_settings(kwargs)
            config = read_config(folder, changed)
            kwargs = {name: value for name, value in kwargs.items() if name not in changed}
        config.check()
        header = read_header(folder)
        if not kwargs.get("ignore_mismatched_sizes"):
            check_fit(header, config, cls)
        # an adapter in the folder is not checked, so it is not loaded
        kwargs.pop("adapter_kwargs", None)
        generation = kwargs.pop("generation_config", None) or read_generation_settings(folder, config)
        loaded = super().from_pretrained(
            None,
            *model_args,
            config=config,
            state_dict=read_weights(header),
            generation_config=generation,
            **kwargs,
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(name)
        return loaded

    def get_encoder(self, modality: str | None = None) -> RelposEncoder:
        """The encoder, as `generate` asks for it."""
        return self.encoder

    def get_decoder(self) -> RelposDecoder:
        """The decoder."""
        return self.decoder

    def get_input_embeddings(self) -> nn.Embedding:
        """The subword embeddings, shared by both sides."""
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        """Replace the subword embeddings of both sides."""
        self.shared = self.encoder.embedding.tokens = self.decoder.embedding.tokens = value

    def create_masks_for_generate(
        self, *, attention_mask: Tensor | None, **arguments: object
    ) -> Tensor | None:
        """The mask [batch, target], unchanged; attention takes the length from the cache."""
        return attention_mask

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels [batch, target] shifted right by one; the start token precedes the first real label."""
        shifted = F.pad(labels[:, :-1], (1, 0), value=-100)
        is_real = labels != -100
        # a row without labels begins with the start token
        is_first = (is_real.cumsum(1) == 1) & is_real
        is_first[:, 0] |= ~is_real.any(1)
        shifted = shifted.masked_fill(is_first, self.config.decoder_start_token_id)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: EncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Score the next subword after every target token.

        Args:
            input_ids, attention_mask: [batch, source]; the mask is 1 for tokens, 0 for padding.
            decoder_input_ids: [batch, chunk], the next tokens of the target. Default: from labels.
            decoder_attention_mask: [batch, target], cached tokens included. Default with labels: padding
                before the start token is masked.
            encoder_outputs: output of the encoder, instead of input_ids.
            cache: keys and values of earlier chunks; returned with those of this chunk appended.
            labels: [batch, target]; -100, on either side, is ignored in the loss.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels.
            output_attentions, output_hidden_states, return_dict: False, False and True, or None; `generate`
                passes them.
        Returns:
            logits [batch, chunk, vocab_size]; loss in nats per token if labels are given.
        Raises:
            ValueError: source or target is missing. TypeError: an unsupported output is requested.
        """
        _check_outputs(output_attentions, output_hidden_states, return_dict)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("forward needs input_ids or encoder_outputs; got neither.")
            encoder_outputs = self.encoder(input_ids, attention_mask)
        memory = encoder_outputs[0]
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("forward needs decoder_input_ids or labels; got neither.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if labels is not None and decoder_attention_mask is None:
            decoder_attention_mask = self._left_padding_mask(decoder_input_ids)
        if cache is None and use_cache and labels is None:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

        states = self.decoder(decoder_input_ids, memory, decoder_attention_mask, attention_mask, cache)
        logits = self.lm_head(states)
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, cache=cache, encoder_last_hidden_state=memory)

    def _left_padding_mask(self, decoder_input_ids: Tensor) -> Tensor | None:
        """The mask [batch, target] that hides padding before the start token; None if there is no padding."""
        padding = self.config.pad_token_id
        if padding == self.config.decoder_start_token_id:
            return None
        # a compiled graph cannot branch on data, and always gets the mask
        if not torch.compiler.is_compiling() and not bool((decoder_input_ids[:, :1] == padding).any()):
            return None
        return ((decoder_input_ids != padding).cumsum(1) > 0).long()

    def _loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        smoothing = self.config.label_smoothing if self.training else 0.0
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", label_smoothing=smoothing
        )
        count = (labels != -100).sum().clamp(min=1) if num_items is None else num_items
        return total / count


AutoConfig.register("relpos", RelposConfig)
AutoModel.register(RelposConfig, RelposForConditionalGeneration)
AutoModelForSeq2SeqLM.register(RelposConfig, RelposForConditionalGeneration)
