"""Weights of a model's folder: safetensors, in one file or in shards, checked before they are loaded."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from relpos.translation.config import RelposConfig
from relpos.translation.errors import ModelFolderError, first_line, list_names
from relpos.translation.old_formats import convert_shapes, convert_weights, is_first_format, old_names
from relpos.translation.strict_json import MEBIBYTE, check_regular, read_object
from relpos.translation.validators import shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_WEIGHTS = 100_000
_LONGEST_HEADER = 16 * MEBIBYTE
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Header:
    """The file and the shape of each weight, as read from the file `source`."""

    source: Path
    files: dict[str, Path]
    shapes: dict[str, list[int]]

    @property
    def is_old(self) -> bool:
        """Whether the weights are of an older format, and are converted when they are read."""
        return is_first_format(self.shapes)


class FolderWeights(dict[str, Tensor]):
    """Weights by name, with the header of the files that they were read from."""

    def __init__(self, weights: dict[str, Tensor], header: Header) -> None:
        super().__init__(weights)
        self.header = header

    def files_in_place(self) -> tuple[list[str] | None, dict[str, dict[str, str]] | None]:
        """The files that hold these weights as they are, and the index that names the file of each.

        Both None if the weights were converted.
        """
        if self.header.is_old:
            return None, None
        paths = dict.fromkeys(map(str, self.header.files.values()))
        return [*paths], {"weight_map": {name: path.name for name, path in self.header.files.items()}}


def read_header(folder: Path) -> Header:
    """The names and shapes of the weights in `folder`, without reading the weights.

    Raises:
        ModelFolderError: there are no weights, a file cannot be read, a weight is not floating point, the
            index disagrees with the shards, or weights of an older format cannot be converted.
    """
    if (folder / INDEX).exists():
        if (folder / WEIGHTS).exists():
            # saving in shards leaves an older single file, which transformers would load
            raise ModelFolderError(f"{folder}: has both {WEIGHTS} and {INDEX}. Remove the one that is older.")
        header = _read_shards(folder)
    else:
        shapes = _read_shapes(folder / WEIGHTS)
        header = Header(folder / WEIGHTS, dict.fromkeys(shapes, folder / WEIGHTS), shapes)
    if header.is_old:
        try:
            convert_shapes(header.shapes)
        except ValueError as error:
            raise ModelFolderError(f"{header.source}: {error}") from error
    return header


def check_fit(header: Header, config: RelposConfig, model: type[nn.Module]) -> None:
    """Compare the shapes in `header` with those of `model` built from `config`, without allocating weights.

    Raises:
        ModelFolderError: weights are missing, unknown, or have another shape; the message names them.
    """
    needed, known = _expected_shapes(config, model)
    # by the names in the file, but for those that are not there
    told = old_names(header.shapes) if header.is_old else {}
    shapes = _of_model(convert_shapes(header.shapes) if header.is_old else header.shapes, known)
    kinds = {
        "missing": sorted(needed - shapes.keys()),
        "unknown": sorted({told.get(name, name) for name in shapes.keys() - known.keys()}),
        "of another shape": [
            f"{_part(name, told)} ({shape}, not {known[name]})"
            for name, shape in sorted(shapes.items())
            if name in known and shape != known[name]
        ],
    }
    faults = [f"{kind}: {list_names(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise ModelFolderError(f"{header.source}: does not fit its config.json; weights {'; '.join(faults)}.")


def read_weights(header: Header) -> FolderWeights:
    """The weights, memory-mapped from their files.

    Raises:
        ModelFolderError: a file cannot be read, or a weight is not finite.
    """
    weights = {}
    for path in dict.fromkeys(header.files.values()):
        try:
            with safe_open(path, "pt") as file:
                for name in (name for name, place in header.files.items() if place == path):
                    weights[name] = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise _unreadable(path, error) from error
    broken = [name for name, weight in weights.items() if not _is_finite(weight)]
    if broken:
        raise ModelFolderError(
            f"{header.source}: weights that are not finite (NaN or infinite): {list_names(broken)}; "
            "the training diverged. Use an earlier checkpoint."
        )
    return FolderWeights(convert_weights(weights) if header.is_old else weights, header)


def _part(name: str, told: dict[str, str]) -> str:
    """The name in the file, and which part of it is meant if it is packed."""
    old = told.get(name, name)
    return f"{old}, {name.split('.')[-2]}" if ".in_proj_" in old else old


def _of_model(shapes: dict[str, list[int]], known: dict[str, list[int]]) -> dict[str, list[int]]:
    """The shapes by the names of `known`: a model with its output layer loads as one without, and back."""
    if any(name.startswith("model.") for name in known):
        return {
            f"model.{name}" if f"model.{name}" in known else name: shape for name, shape in shapes.items()
        }
    return {
        name.removeprefix("model."): shape
        for name, shape in shapes.items()
        if not name.startswith("lm_head.")
    }


def _expected_shapes(config: RelposConfig, model: type[nn.Module]) -> tuple[set[str], dict[str, list[int]]]:
    """The names of required weights, and the shapes of all known ones; transformers omits tied weights.

    All layers of a side have the same shapes, so a model with one layer on each side is built on "meta".
    """
    one_layer = copy.deepcopy(config)
    one_layer.encoder_layers = one_layer.decoder_layers = 1
    with torch.device("meta"):
        small = model(one_layer)
    known = {}
    # a tied weight is one parameter with several names, each of which may be in the file
    parameters = {name for name, _ in small.named_parameters()}
    needed = set()
    for name, weight in small.state_dict().items():
        side, layers, place = name.partition(".layers.0.")
        counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        count = counts[side.removeprefix("model.")] if layers else 1
        for i in range(count):
            full = f"{side}.layers.{i}.{place}" if layers else name
            known[full] = list(weight.shape)
            if name in parameters:
                needed.add(full)
    return needed, known


def _read_shards(folder: Path) -> Header:
    index = folder / INDEX
    places = read_object(index, 64 * MEBIBYTE).get("weight_map")
    if not isinstance(places, dict) or not places or len(places) > _MOST_WEIGHTS:
        raise ModelFolderError(f"{index}: weight_map must name the file of each weight; the file is damaged.")
    for name in places.values():
        # without separators the path stays in the folder
        if type(name) is not str or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise ModelFolderError(
                f"{index}: weight_map must name .safetensors files in this folder; got {shown(name)}."
            )
    shapes: dict[str, list[int]] = {}
    files: dict[str, Path] = {}
    for shard in sorted(set(places.values())):
        found = _read_shapes(folder / shard)
        listed = {name for name, place in places.items() if place == shard}
        if found.keys() != listed:
            raise ModelFolderError(
                f"{index}: does not fit {shard} in {list_names(sorted(found.keys() ^ listed))}. "
                "Copy the model again."
            )
        shapes |= found
        files |= dict.fromkeys(found, folder / shard)
    return Header(index, files, shapes)


def _read_shapes(path: Path) -> dict[str, list[int]]:
    check_regular(path)
    try:
        with path.open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header must have at most {_LONGEST_HEADER:,} bytes; got {length:,}")
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if len(names) > _MOST_WEIGHTS:
                raise ValueError(f"it must have at most {_MOST_WEIGHTS:,} weights; got {len(names):,}")
            slices = {name: file.get_slice(name) for name in names}
            others = [name for name, weight in slices.items() if weight.get_dtype() not in _FLOATS]
            if others:
                raise ValueError(
                    f"the type of weights must be one of {_FLOATS}; got others in {list_names(others)}"
                )
            return {name: list(weight.get_shape()) for name, weight in slices.items()}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(f"{path}: the weights cannot be read ({first_line(error)}).")


def _is_finite(weight: Tensor) -> bool:
    # the sum needs no memory; it is infinite for some finite weights, hence the second test
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
