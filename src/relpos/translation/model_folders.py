"""Locates or downloads a model's folder, and reads its configuration."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from relpos.translation.config import RelposConfig
from relpos.translation.errors import ModelFolderError, first_line
from relpos.translation.strict_json import read_object

_FILES = ["config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"]
_OF_THE_HUB = ("revision", "cache_dir", "token", "force_download", "local_files_only")


def local_folder(name: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """The folder `name`, or the downloaded repository of that name on the Hugging Face Hub.

    Args:
        options: the download options of transformers' `from_pretrained`, and subfolder.
    Raises:
        OSError: there is no such folder or repository.
    """
    folder = Path(name)
    if not folder.is_dir():
        asked = {key: options[key] for key in _OF_THE_HUB if options.get(key) is not None}
        try:
            folder = Path(snapshot_download(str(name), allow_patterns=_FILES, **asked))
        except (OSError, ValueError) as error:
            raise OSError(
                f"{name}: no such folder, and it cannot be downloaded ({first_line(error)})."
            ) from error
    return folder / (options.get("subfolder") or "")


def read_config(folder: Path, changed: dict[str, Any]) -> RelposConfig:
    """The configuration in `folder`, with the settings in `changed` replaced.

    Raises:
        ModelFolderError: it is missing or damaged, or a value has a wrong type or is out of range.
    """
    path = folder / "config.json"
    try:
        return RelposConfig(**(read_object(path) | changed))
    except ModelFolderError:
        raise
    except (ValueError, TypeError) as error:
        raise ModelFolderError(f"{path}: {error}") from error


def config_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration among `options`, without dtype, which is an option of loading."""
    names = {field.name for field in dataclasses.fields(RelposConfig)} | RelposConfig.attribute_map.keys()
    return {name: value for name, value in options.items() if name in names - {"dtype"}}
