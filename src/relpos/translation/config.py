"""The model's configuration, which covers every row of the paper's tables 1 to 3.

A configuration may be untrusted: every key has a type and bounds, and unknown keys have no effect.
"""

import warnings
from os import PathLike
from typing import Any

from transformers import PreTrainedConfig

from relpos._positions import two_sides
from relpos.translation.errors import RelposWarning, list_names
from relpos.translation.validators import (
    Rule,
    boolean,
    check,
    dict_of,
    either,
    integer,
    list_of,
    number,
    one_of,
    optional,
    shown,
    text,
)

FORMAT = 2  # raise it when the meaning of a weight or a setting changes; old_formats.py reads older ones
MOST = 2**20  # of subwords, widths, positions and distances; far beyond any model, and products stay small
_MOST_LAYERS = 1000
_MOST_LABELS = 1000
_FLOATS = ("float64", "float32", "float16", "bfloat16")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("vocab_size", "d_model", "num_heads", "d_ff", "max_positions"), integer(1, MOST)),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), integer(1, _MOST_LAYERS)),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "label_smoothing"), number(0, 1)),
    **dict.fromkeys(
        (
            *("norm_first", "tie_word_embeddings", "output_bias"),
            *("relative_keys", "relative_values", "relative_per_head", "relative_tied"),
        ),
        boolean(),
    ),
    "layer_norm_eps": number(0, 1),
    "target_vocab_size": optional(integer(1, MOST)),
    "absolute_positions": one_of("none", "sinusoidal", "learned"),
    "activation": one_of("relu", "gelu", "silu"),
    "use_cache": optional(boolean()),
    # settings of transformers; those that select another model or other outputs are refused
    "is_encoder_decoder": one_of(True),
    "model_type": one_of("relpos"),
    "dtype": Rule(
        f"null or one of {_FLOATS}",
        lambda value: value is None or str(value) in (*_FLOATS, *(f"torch.{name}" for name in _FLOATS)),
    ),
    "attn_implementation": one_of(None, "relpos", "eager", "sdpa"),
    "experts_implementation": one_of(None, "eager"),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict"), optional(boolean())),
    "chunk_size_feed_forward": integer(0, MOST),
    "num_labels": optional(integer(0, _MOST_LABELS)),
    "id2label": optional(dict_of(either(integer(0, MOST), text(9)), text(), _MOST_LABELS)),
    "label2id": optional(dict_of(text(), either(integer(0, MOST), text(9)), _MOST_LABELS)),
    "problem_type": one_of(None, "regression", "single_label_classification", "multi_label_classification"),
    "architectures": optional(list_of(text(), 0, 100)),
    "transformers_version": optional(text()),
    "name_or_path": Rule("a name or a path", lambda value: isinstance(value, (str, PathLike))),
}
_RULES["torch_dtype"] = _RULES["dtype"]
# keys of transformers, which are not fields: those that are used, and those that are ignored
_TAKEN = (
    *("torch_dtype", "num_labels", "name_or_path"),
    *("output_attentions", "attn_implementation", "experts_implementation"),
)
_KNOWN = ("model_type", "_name_or_path", "_commit_hash")


class RelposConfig(PreTrainedConfig):
    """Configuration of an encoder-decoder with relative positions, absolute positions, both or none.

    Args:
        vocab_size: subwords, shared by both languages unless target_vocab_size is given.
        target_vocab_size: subwords of the target, which then has embeddings of its own; None for one
            vocabulary.
        d_model, encoder_layers, decoder_layers, num_heads, d_ff: sizes; num_heads divides d_model.
        dropout: of embeddings and of the output of each block.
        attention_dropout, activation_dropout: of attention weights, and inside the feed-forward network.
        activation: "relu", "gelu" or "silu".
        norm_first: layer normalisation before each block and once at the end, or after each block.
        absolute_positions: "none", "sinusoidal" or "learned".
        max_positions: rows of the table of learned positions, tokens; used only with "learned".
        relative_max_distance: k, [left, right], or None for no relative positions. The decoder never
            looks right, so its tables hold the left rows and distance 0 only.
        relative_keys, relative_values: whether to add relative positions to keys (eq. 4) and values (eq. 3).
        relative_per_head: a table per head (the paper's base model) or one per layer (its big one).
        relative_tied: one table serves keys and values, as in some other toolkits; the paper has two.
        layer_norm_eps: epsilon of the layer normalisations.
        tie_word_embeddings: whether the output layer shares the embeddings of the target.
        output_bias: whether the output layer has a bias.
        label_smoothing: of the training loss; unused in evaluation mode.
        use_cache: whether a call returns the cache by default, but for training.

    Settings of transformers are checked too: `attn_implementation` is "relpos" (the default), "eager", or
    "sdpa" without relative positions; any other could name a kernel to download. Unknown settings, as later
    versions may write, are ignored with a warning.

    Raises:
        ValueError: a setting has a wrong type or value, or the format is newer than this relpos.
        TypeError: relative_max_distance has a wrong type.
    """

    model_type = "relpos"
    attribute_map = {  # noqa: RUF012 - the base class declares it so
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
    }

    format: int = FORMAT
    vocab_size: int = 32768
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    num_heads: int = 8
    d_ff: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    activation: str = "relu"
    norm_first: bool = True
    absolute_positions: str = "none"
    max_positions: int = 512
    relative_max_distance: Any = 16
    relative_keys: bool = True
    relative_values: bool = True
    relative_per_head: bool = False
    relative_tied: bool = False
    layer_norm_eps: float = 1e-5
    output_bias: bool = False
    target_vocab_size: int | None = None
    label_smoothing: float = 0.1
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        unknown = [name for name in kwargs if name not in (*_TAKEN, *_KNOWN)]
        if unknown:
            warnings.warn(
                f"settings that RelposConfig does not know are ignored: {list_names(unknown)}.",
                RelposWarning,
                stacklevel=3,
            )
        check(kwargs, _RULES)
        self.check()
        # weights of an older format are converted when they are loaded; the settings mean the same
        self.format = FORMAT
        super().__post_init__(**{name: kwargs[name] for name in _TAKEN if name in kwargs})

    def check(self) -> None:
        """Check all settings, including those changed after construction. Raises: as the class."""
        if type(self.format) is int and self.format > FORMAT:
            raise ValueError(f"format must be at most {FORMAT}; got {shown(self.format)}. Upgrade relpos.")
        check(vars(self), _RULES | {"format": integer(1, FORMAT)})
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads must divide d_model = {self.d_model}; got {self.num_heads}.")
        check(vars(self), token_rules(self))
        if self.relative_tied and not (self.relative_keys and self.relative_values):
            raise ValueError(
                "relative_tied must be False unless relative_keys and relative_values are True; got True. "
                "A table shared by both needs both."
            )
        if not _DISTANCE.fits(self.relative_max_distance):
            raise TypeError(
                "relative_max_distance must be None, an integer k, or two integers (left, right); got "
                f"{shown(self.relative_max_distance)}. Give one of these."
            )
        sides = two_sides(self.relative_max_distance, "relative_max_distance")
        if sides is not None and max(sides) > MOST:
            raise ValueError(f"relative_max_distance must be at most {MOST:,}; got {shown(max(sides))}.")

    @property
    def output_attentions(self) -> bool | None:
        """Whether calls return attention weights by default; here with every implementation."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Nothing to check; transformers' own models return weights with "eager" only."""

    @property
    def decoder_vocab_size(self) -> int:
        """Number of subwords of the target."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size

    @property
    def is_relative(self) -> bool:
        """Whether self-attention has tables of relative positions."""
        return self.relative_max_distance is not None and (self.relative_keys or self.relative_values)

    @property
    def encoder_max_distance(self) -> tuple[int, int] | None:
        """Clip distances (left, right) of the encoder, tokens."""
        return two_sides(self.relative_max_distance, "relative_max_distance")

    @property
    def decoder_max_distance(self) -> tuple[int, int] | None:
        """Clip distances of the decoder, tokens; nothing right of a query is ever attended."""
        sides = self.encoder_max_distance
        return None if sides is None else (sides[0], 0)


_INTEGER = Rule("an integer", lambda value: type(value) is int)
_DISTANCE = optional(either(_INTEGER, list_of(_INTEGER, 2, 2)))


def token_rules(config: RelposConfig) -> dict[str, Rule]:
    """The rules for ids of special tokens, in a configuration and in generation_config.json."""
    inside = integer(0, config.decoder_vocab_size - 1)
    return {
        "pad_token_id": integer(0, min(config.vocab_size, config.decoder_vocab_size) - 1),
        "bos_token_id": optional(inside),
        "eos_token_id": either(inside, list_of(inside, 1, 100)),
        "decoder_start_token_id": inside,
    }
