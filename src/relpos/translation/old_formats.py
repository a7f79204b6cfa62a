"""Converts weights of older formats of the model to the present one, see config.FORMAT.

Format 1 had the layers of `relpos.nn`: one packed weight for query, key and value, and torch.nn's names.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

_T = TypeVar("_T")

# the names of format 1 and those of format 2, tried in this order
_RENAMED = (
    (r"shared\.", "model.shared."),
    (r"(encoder|decoder)\.embedding\.tokens\.", r"model.\1.embed_tokens."),
    (r"(encoder|decoder)\.embedding\.positions\.", r"model.\1.embed_positions."),
    (r"(encoder|decoder)\.norm\.", r"model.\1.layer_norm."),
    (r"(encoder|decoder)\.layers\.(\d+)\.linear([12])\.", r"model.\1.layers.\2.fc\3."),
    (r"(encoder|decoder)\.layers\.(\d+)\.norm1\.", r"model.\1.layers.\2.self_attn_layer_norm."),
    (r"encoder\.layers\.(\d+)\.norm2\.", r"model.encoder.layers.\1.final_layer_norm."),
    (r"decoder\.layers\.(\d+)\.norm2\.", r"model.decoder.layers.\1.encoder_attn_layer_norm."),
    (r"decoder\.layers\.(\d+)\.norm3\.", r"model.decoder.layers.\1.final_layer_norm."),
    (r"decoder\.layers\.(\d+)\.multihead_attn\.", r"model.decoder.layers.\1.encoder_attn."),
    (r"(encoder|decoder)\.layers\.(\d+)\.self_attn\.", r"model.\1.layers.\2.self_attn."),
)
_PACKED = re.compile(r"(.*)\.in_proj_(weight|bias)")


def is_first_format(names: Iterable[str]) -> bool:
    """Whether weights of these names are of format 1."""
    return any(
        re.fullmatch(r"(encoder|decoder)\.layers\.\d+\.self_attn\.in_proj_weight", name) for name in names
    )


def convert_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of format 1, by name, as those of format 2; views of the same memory.

    Raises:
        ValueError: as `convert_shapes`.
    """
    convert_shapes({name: list(weight.shape) for name, weight in weights.items()})
    return _converted(weights, lambda weight: list(weight.chunk(3)))


def convert_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of `convert_weights`, from the shapes of format 1.

    Raises:
        ValueError: a packed weight cannot be split in three, or a weight has the names of both formats.
    """
    for name, shape in shapes.items():
        if _PACKED.fullmatch(_new_name(name)) and not (shape and shape[0] > 0 and shape[0] % 3 == 0):
            raise ValueError(
                f"{name} must have 3 * d_model rows, for query, key and value; its shape is {shape}. "
                "Copy the model again."
            )
    return _converted(shapes, lambda shape: [[shape[0] // 3, *shape[1:]]] * 3)


def old_names(names: Iterable[str]) -> dict[str, str]:
    """The names of format 2, each with the name among `names`, of format 1, that it is converted from."""
    return _converted({name: name for name in names}, lambda name: [name] * 3)


def _converted(values: dict[str, _T], split: Callable[[_T], list[_T]]) -> dict[str, _T]:
    converted: dict[str, _T] = {}
    for name, value in values.items():
        new = _new_name(name)
        packed = _PACKED.fullmatch(new)
        if packed is None:
            parts = {new: value}
        else:
            place, kind = packed.groups()
            parts = {f"{place}.{part}_proj.{kind}": x for part, x in zip("qkv", split(value), strict=True)}
        twice = parts.keys() & converted.keys()
        if twice:
            raise ValueError(
                f"{name} must be there once; {min(twice)} is another name of it. Copy the model again."
            )
        converted |= parts
    return converted


def _new_name(name: str) -> str:
    for old, new in _RENAMED:
        found, count = re.subn(f"^{old}", new, name)
        if count:
            return found
    return name
