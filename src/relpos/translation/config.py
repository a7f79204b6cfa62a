"""The model's configuration: every row of the paper's tables 1 to 3 is one setting of it."""

from typing import Any

from transformers import PreTrainedConfig

from relpos.positions import two_sides

FORMAT = 1  # raised when the meaning of a weight or a setting changes

_COUNTS = (
    "format",
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "num_heads",
    "d_ff",
    "max_positions",
)
_CHOICES = {
    "absolute_positions": ("none", "sinusoidal", "learned"),
    "activation": ("relu", "gelu", "silu"),
}


class RelposConfig(PreTrainedConfig):
    """Configuration of an encoder-decoder with relative or absolute positions, or both, or neither.

    Args:
        vocab_size: subwords, shared by both languages.
        d_model, encoder_layers, decoder_layers, num_heads, d_ff: sizes; num_heads divides d_model.
        dropout: on embeddings and on what each block adds.
        attention_dropout, activation_dropout: on attention weights, inside the feed-forward network.
        activation: "relu", "gelu" or "silu".
        norm_first: layer normalisation before each block and once at the end, or after each block.
        absolute_positions: "none", "sinusoidal" or "learned".
        max_positions: rows of a learned table, tokens; read only with "learned".
        relative_max_distance: k, [left, right], or None for no relative positions. The decoder never
            looks right, so its tables hold the left rows and distance 0 only.
        relative_keys, relative_values: whether distances act on keys (eq. 4) and values (eq. 3).
        relative_per_head: a table per head (the paper's base model) or one per layer (its big one).
        label_smoothing: of the training loss; not applied in evaluation mode.

    Raises:
        ValueError: a setting outside its choices, or a checkpoint of a newer format.
        TypeError: relative_max_distance is neither of its kinds.
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
    label_smoothing: float = 0.1
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on; got {value!r}.")
        if self.format > FORMAT:
            raise ValueError(
                f"this checkpoint has format {self.format}; this relpos knows up to {FORMAT}. Upgrade relpos."
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}; got {getattr(self, name)!r}.")
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads must divide d_model = {self.d_model}; got {self.num_heads}.")
        two_sides(self.relative_max_distance, "relative_max_distance")

    @property
    def encoder_max_distance(self) -> tuple[int, int] | None:
        """Clip distances (left, right) of the encoder, tokens."""
        return two_sides(self.relative_max_distance, "relative_max_distance")

    @property
    def decoder_max_distance(self) -> tuple[int, int] | None:
        """Clip distances of the decoder, tokens; nothing right of a query is ever attended."""
        sides = self.encoder_max_distance
        return None if sides is None else (sides[0], 0)
