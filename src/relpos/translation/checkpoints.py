"""Folders that hold a model or a checkpoint: sealed when whole, verified when read.

The seal is a file of sizes and SHA-256 sums, written last, so that a folder half-written, cut short or
changed afterwards is never taken for a whole one. Weights are safetensors; nothing is unpickled here.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError
from relpos.translation.files import write_folder_whole, write_text_whole
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import load_tokenizer

_SEAL = "seal.json"
_WEIGHTS = "model.safetensors"


def seal(folder: Path) -> None:
    """Write down what `folder` holds; the last step of saving."""
    sums = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _SEAL
    }
    write_text_whole(folder / _SEAL, json.dumps({"format": 1, "files": sums}, indent=1))


def is_sealed(folder: Path) -> bool:
    """Whether saving `folder` came to its end."""
    return (folder / _SEAL).is_file()


def verify(folder: Path) -> None:
    """Compare `folder` with its seal, if it has one.

    Raises:
        InputError: a file is missing, cut short or changed, the seal among them.
    """
    if not is_sealed(folder):
        return
    try:
        sums = json.loads((folder / _SEAL).read_text("utf-8"))["files"]
        expectations = [(str(name), int(x["bytes"]), str(x["sha256"])) for name, x in sums.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{folder / _SEAL}: the file is damaged. Copy or train the model again.") from None
    for name, size, sha256 in expectations:
        path = folder / name
        if not path.is_file():
            raise InputError(f"{folder}: the file {name} is missing. Copy or train the model again.")
        if path.stat().st_size != size:
            raise InputError(
                f"{path}: {path.stat().st_size:,} bytes where {size:,} were saved; the file was "
                "cut short or changed. Copy or train the model again."
            )
        if _sha256(path) != sha256:
            raise InputError(f"{path}: its content was changed after saving. Copy or train the model again.")


def sealed_names(folder: Path) -> set[str]:
    """Names of the files in `folder` that its seal lists, with `/` between them; none where it is damaged."""
    try:
        names = json.loads((folder / _SEAL).read_bytes())["files"].keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()
    return {name for name in names if not PurePosixPath(name).is_absolute() and ".." not in name.split("/")}


def save_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder and put it, sealed, in the place of `folder`; all or nothing.

    What stands in `folder` and was not sealed there is kept.
    """
    before = {PurePosixPath(name).parts[0] for name in sealed_names(folder)} | {_SEAL}

    def write_sealed(draft: Path) -> None:
        write(draft)
        seal(draft)

    write_folder_whole(folder, write_sealed, is_ours=lambda path: path.name in before)


def find_model(folder: Path) -> Path:
    """The model's own folder, given it or the folder of the run that trained it.

    Raises:
        InputError: there is no relpos model.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Give the folder of a model or of a training run.")
    for place in (folder, folder / "model"):
        config = place / "config.json"
        if config.is_file():
            kind = _model_type(config)
            if kind != "relpos":
                raise InputError(f"{place}: not a relpos model, its model_type is {kind!r}.")
            if place.name.startswith("checkpoint-") and not is_sealed(place):
                raise InputError(f"{place}: saving this checkpoint did not come to its end. Take another.")
            return place
    if (folder / "checkpoints").is_dir():
        names = [path.name for path in sealed_checkpoints(folder / "checkpoints")]
        raise InputError(
            f"{folder}: this run has no finished model yet. Finish it with --resume, or give one of its "
            f"checkpoints: {', '.join(names) or 'none'}."
        )
    raise InputError(f"{folder}: not a model folder, there is no config.json in it.")


def load_model(folder: Path) -> tuple[RelposForConditionalGeneration, PreTrainedTokenizerFast]:
    """The model in `folder` (or `folder`/model) in evaluation mode, and its tokenizer.

    Raises:
        InputError: not a relpos model, or damaged.
    """
    folder = find_model(folder)
    verify(folder)
    if not (folder / _WEIGHTS).is_file():
        raise InputError(f"{folder}: the file {_WEIGHTS} is missing.")
    try:
        config = RelposConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, OSError) as error:
        raise InputError(
            f"{folder / 'config.json'}: {str(error).strip().splitlines()[-1].strip()}"
        ) from error
    try:
        faults = _faults(folder / _WEIGHTS, config)
        if faults:
            raise InputError(
                f"{folder / _WEIGHTS}: does not fit its config.json; weights {'; '.join(faults)}."
            )
        model = RelposForConditionalGeneration.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"{folder / _WEIGHTS}: the weights cannot be read ({first}).") from error
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} subwords and the model {config.vocab_size}; they "
            "do not belong together. Copy or train the model again."
        )
    return model.eval(), tokenizer


def _faults(weights: Path, config: RelposConfig) -> list[str]:
    """Weights that are missing, unknown or of another shape; transformers leaves out tied ones."""
    with torch.device("meta"):
        model = RelposForConditionalGeneration(config)
    # a tied weight is one parameter, and may be in the file under each of its names
    needed = {name: list(weight.shape) for name, weight in model.named_parameters()}
    known = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    with safe_open(weights, "pt") as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    kinds = {
        "missing": sorted(needed.keys() - found.keys()),
        "unknown": sorted(found.keys() - known.keys()),
        "of another shape": [
            f"{name} ({shape}, not {known[name]})"
            for name, shape in sorted(found.items())
            if name in known and shape != known[name]
        ],
    }
    return [
        f"{kind}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for kind, names in kinds.items()
        if names
    ]


def sealed_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    numbered = [
        (int(path.name.rpartition("-")[2]), path)
        for path in folder.glob("checkpoint-*")
        if re.fullmatch("checkpoint-[0-9]+", path.name) and not path.is_symlink() and is_sealed(path)
    ]
    return [path for _, path in sorted(numbered)]


def average_weights(folders: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of each weight over the models in `folders`, summed in float64.

    Raises:
        ValueError: the models hold weights of different names.
    """
    total: dict[str, torch.Tensor] = {}
    for folder in folders:
        weights = load_file(folder / _WEIGHTS)
        if total and total.keys() != weights.keys():
            names = ", ".join(sorted(total.keys() ^ weights.keys()))
            raise ValueError(f"averaged models must hold the same weights; {folder} differs in {names}.")
        for name, weight in weights.items():
            total[name] = total[name] + weight.double() if name in total else weight.double()
    return {name: (weight / len(folders)).float() for name, weight in total.items()}


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Put `weights` in the place of those in `folder`."""
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def _model_type(config: Path) -> str | None:
    try:
        return json.loads(config.read_text("utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise InputError(f"{config}: not a JSON object; the file is damaged.") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
