"""Folders of models and checkpoints: sealed when complete, compared with the seal when read.

The seal is a file of sizes and SHA-256 sums, written last, so that an incomplete or changed folder is
recognised. Weights are safetensors; nothing is unpickled here.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from relpos.translation.atomic_files import write_folder_atomic, write_text_atomic
from relpos.translation.errors import InputError
from relpos.translation.old_formats import convert_weights, is_first_format
from relpos.translation.ownership import is_marked
from relpos.translation.strict_json import MEBIBYTE, read_object
from relpos.translation.validators import Rule, check, dict_of, integer, shown

_SEAL = "seal.json"
CARD = "README.md"
_SMALL = MEBIBYTE  # bytes; smaller files are compared completely
_BLOCK = 4096
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Change:
    """A difference between a file and the seal; `told` describes it."""

    path: Path
    is_missing: bool
    told: str


def seal(folder: Path, is_wanted: Callable[[str], bool] = lambda name: True, *, by: str = "relpos") -> None:
    """Write the seal of `folder`, the last step of saving. Hidden files are not sealed.

    Args:
        is_wanted: whether to seal a file, given its path in the folder, with `/`.
        by: "relpos" for a folder that a run may replace, "user" for one that it may not.
    """
    files = {
        name: _entry(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name != _SEAL
        and not _is_hidden(path.relative_to(folder))
        # a user's file may have a name that a seal cannot hold
        and _is_name(name := path.relative_to(folder).as_posix())
        and is_wanted(name)
    }
    write_text_atomic(folder / _SEAL, json.dumps({"format": 1, "by": by, "files": files}, indent=1))


def is_sealed(folder: Path) -> bool:
    """Whether `folder` was saved completely."""
    return (folder / _SEAL).is_file()


def verify(folder: Path) -> None:
    """Compare every byte in `folder` with its seal, if it has one.

    Raises:
        InputError: a file, or the seal itself, is missing, truncated or changed.
    """
    for change in _changes(folder, lambda path, entry: _sha256(path) == entry["sha256"]):
        raise InputError(damage(folder, change))


def damage(folder: Path, change: Change) -> str:
    """The error message for `change` in `folder`."""
    if change.is_missing:
        name = change.path.relative_to(folder).as_posix()
        return f"{folder}: the file {name} is missing. Copy or train the model again."
    return f"{change.path}: {change.told}. Copy or train the model again."


def changes(folder: Path) -> list[Change]:
    """The differences from the seal of `folder`, if it has one, found within milliseconds.

    Compares sizes, the content of small files, and 64 blocks of large files. That finds fine-tuning, which
    changes a whole file; only `verify` finds a single changed byte.

    Raises:
        InputError: the seal is damaged.
    """
    return _changes(folder, _is_alike)


def read_seal(folder: Path) -> dict[str, dict[str, Any]]:
    """The seal's entry for each file of `folder`: bytes, sha256, and sample for large files.

    Raises:
        InputError: the seal is damaged, or names a file outside the folder.
    """
    try:
        files = read_object(folder / _SEAL, 64 * MEBIBYTE)["files"]
        check({"files": files}, {"files": dict_of(_NAME, _ENTRY, 100_000)})
    except (InputError, ValueError, KeyError):
        raise InputError(
            f"{folder / _SEAL}: the file is damaged. Copy or train the model again, or remove this file "
            "and create a new one with relpos seal."
        ) from None
    return dict(files)


def _changes(folder: Path, is_same: Callable[[Path, dict[str, Any]], bool]) -> list[Change]:
    if not is_sealed(folder):
        return []
    found = []
    for name, entry in read_seal(folder).items():
        path = folder / name
        if name == CARD:
            # for readers, who edit it
            continue
        if not path.is_file():
            found.append(Change(path, True, "missing"))
        elif path.stat().st_size != entry["bytes"]:
            sizes = f"{path.stat().st_size:,} bytes where {entry['bytes']:,} were saved"
            found.append(Change(path, False, f"{sizes}; the file was cut short or changed"))
        elif not is_same(path, entry):
            found.append(Change(path, False, "its content was changed after saving"))
    return found


def sealed_names(folder: Path) -> set[str]:
    """Paths of the files that a run wrote into `folder`, with `/`, from its seal.

    Empty if the seal is damaged, or a user's, which may include the user's own files.
    """
    try:
        return set(read_seal(folder)) if is_sealed(folder) and not is_sealed_by_user(folder) else set()
    except InputError:
        return set()


def is_sealed_by_user(folder: Path) -> bool:
    """Whether a user has sealed `folder` with `relpos seal`."""
    try:
        return read_object(folder / _SEAL, 64 * MEBIBYTE).get("by", "relpos") != "relpos"
    except InputError:
        return False


def make_readable(folder: Path) -> None:
    """Give weights the permissions of the seal; safetensors makes them readable by their owner only."""
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            shutil.copymode(folder / _SEAL, path)


def save_sealed(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill a new folder with `write`, seal it, and replace `folder` by it; all or nothing.

    Files in `folder` that its seal does not name are kept, and a model card that was edited.
    """
    before = sealed_names(folder) | {_SEAL}
    card = folder / CARD
    is_edited = card.is_file() and not (CARD in before and _is_alike(card, read_seal(folder)[CARD]))

    def write_sealed(draft: Path) -> None:
        write(draft)
        if is_edited:
            shutil.copy(card, draft)
        seal(draft)
        make_readable(draft)

    def is_ours(path: Path) -> bool:
        files = [path] if not path.is_dir() else [inner for inner in path.rglob("*") if not inner.is_dir()]
        return all(inner.relative_to(folder).as_posix() in before for inner in files)

    write_folder_atomic(folder, write_sealed, is_ours)


def find_model(folder: Path) -> Path:
    """The folder of a model, given that folder or the one of its run.

    Raises:
        InputError: there is no relpos model.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Give the folder of a model or of a training run.")
    for place in (folder, folder / "model"):
        config = place / "config.json"
        if config.is_file():
            kind = read_object(config).get("model_type")
            if kind != "relpos":
                raise InputError(f"{place}: model_type must be 'relpos'; got {shown(kind)}.")
            is_of_run = place.name.startswith("checkpoint-") and is_marked(place.resolve().parents[1])
            if is_of_run and not is_sealed(place):
                raise InputError(f"{place}: this checkpoint was not saved completely. Use another.")
            return place
    if (folder / "checkpoints").is_dir():
        names = [path.name for path in sealed_checkpoints(folder / "checkpoints")]
        raise InputError(
            f"{folder}: this run has no finished model yet. Finish it with --resume, or give one of its "
            f"checkpoints: {', '.join(names) or 'none'}."
        )
    raise InputError(f"{folder}: not a model folder, there is no config.json in it.")


def recipe_places(model: Path) -> list[Path]:
    """Where the recipe of a model may be: beside it, and for a checkpoint also in its run."""
    places = [model, model.parent.parent] if model.name.startswith("checkpoint-") else [model]
    return [place / "recipe.yaml" for place in places]


def sealed_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    numbered = [
        (int(path.name.rpartition("-")[2]), path)
        for path in folder.glob("checkpoint-*")
        if re.fullmatch("checkpoint-[0-9]+", path.name) and not path.is_symlink() and is_sealed(path)
    ]
    return [path for _, path in sorted(numbered)]


def average_weights(folders: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of each weight over the models in `folders`, summed in float64.

    Those of an older format are converted first.

    Raises:
        ValueError: the names of the weights differ.
    """
    total: dict[str, torch.Tensor] = {}
    for folder in folders:
        weights = load_file(folder / _WEIGHTS)
        if is_first_format(weights):
            weights = convert_weights(weights)
        if total and total.keys() != weights.keys():
            names = ", ".join(sorted(total.keys() ^ weights.keys()))
            raise ValueError(f"averaged models must have the same weights; {folder} differs in {names}.")
        for name, weight in weights.items():
            total[name] = total[name] + weight.double() if name in total else weight.double()
    return {name: (weight / len(folders)).float() for name, weight in total.items()}


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Replace the weights in `folder` by `weights`."""
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def _is_name(name: object) -> bool:
    """Whether `name` is a relative path inside a folder."""
    if type(name) is not str or not name or len(name) > 1000 or set(name) & set("\\\0:"):
        return False
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    sums = [entry.get("sha256"), entry.get("sample", "0" * 64)]
    return integer(0, 2**63).fits(entry.get("bytes")) and all(
        type(digest) is str and re.fullmatch("[0-9a-f]{64}", digest) for digest in sums
    )


_NAME = Rule("a path in the folder", _is_name)
_ENTRY = Rule("bytes and sha256", _is_entry)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _entry(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    entry = {"bytes": size, "sha256": _sha256(path)}
    return entry | {"sample": _sample(path)} if size > _SMALL else entry


def _is_alike(path: Path, entry: dict[str, Any]) -> bool:
    if entry["bytes"] <= _SMALL:
        return _sha256(path) == entry["sha256"]
    # older seals have no samples, so only sizes are compared
    return "sample" not in entry or _sample(path) == entry["sample"]


def _sample(path: Path) -> str:
    """SHA-256 of 64 evenly spaced blocks, including the first and the last."""
    digest = hashlib.sha256()
    last = path.stat().st_size - _BLOCK
    with path.open("rb") as file:
        for i in range(64):
            file.seek(last * i // 63)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
