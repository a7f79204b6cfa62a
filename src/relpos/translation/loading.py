"""Loads a model from a folder, which may be untrusted; a broken model raises an error of one sentence."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from relpos.translation.checkpoints import (
    changes,
    damage,
    find_model,
    is_sealed,
    read_seal,
    seal,
    verify,
)
from relpos.translation.errors import InputError, RelposWarning, first_line
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import load_tokenizer

# the files of a model
_FILES = (
    *("config.json", "generation_config.json", "recipe.yaml"),
    *("model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


def load_model(folder: Path) -> tuple[RelposForConditionalGeneration, PreTrainedTokenizerFast]:
    """Load the model in `folder` (or `folder`/model), in evaluation mode, and its tokenizer.

    A valid model that was changed after it was sealed, for example by fine-tuning, loads with a warning.
    Large files are compared by size and samples; `verify` compares every byte.

    Raises:
        InputError: the folder has no relpos model, or a damaged one.
    """
    folder = find_model(folder)
    found = changes(folder)
    for change in found:
        # weights may have moved into shards or out of them; missing weights are found below
        if change.is_missing and not change.path.name.startswith("model"):
            raise InputError(damage(folder, change))
    try:
        model, tokenizer = _load(folder)
    except InputError as error:
        told = [change.told for change in found if str(change.path) in str(error) and not change.is_missing]
        if not told:
            raise
        reason = str(error).removesuffix(".")
        raise InputError(f"{reason}; {told[0]}. Copy or train the model again.") from error
    if found:
        warnings.warn(
            f"{found[0].path}: {found[0].told}. The model no longer matches its seal, and is loaded "
            f"anyway. If the change is intended, such as fine-tuning, renew the seal: relpos seal {folder}",
            RelposWarning,
            stacklevel=2,
        )
    return model, tokenizer


def seal_model(folder: Path) -> Path:
    """Seal the model in `folder` (or `folder`/model) in its present state; returns the model's folder.

    Raises:
        InputError: the folder has no relpos model, a damaged one, or an invalid seal.json.
    """
    folder = find_model(folder)
    _load(folder)
    # a user's files beside the model are not sealed
    before = read_seal(folder) if is_sealed(folder) else {}
    seal(folder, lambda name: name in before or any(fnmatch(name, each) for each in _FILES), by="user")
    return folder


def check_seal(folder: Path) -> Path:
    """Compare every byte of the model in `folder` (or `folder`/model) with its seal; returns its folder.

    Raises:
        InputError: there is no relpos model, it has no seal, or it was changed.
    """
    folder = find_model(folder)
    if not is_sealed(folder):
        raise InputError(f"{folder}: has no seal. Make one with: relpos seal {folder}")
    try:
        verify(folder)
    except InputError as error:
        raise InputError(f"{error} If the change is intended, renew the seal: relpos seal {folder}") from None
    return folder


@contextmanager
def no_bars() -> Iterator[None]:
    """Disable transformers' progress bars for weights, since a library does not print."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _load(folder: Path) -> tuple[RelposForConditionalGeneration, PreTrainedTokenizerFast]:
    try:
        with no_bars():
            model = RelposForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: the model cannot be read ({first_line(error)}).") from error
    if model.config.target_vocab_size is not None:
        raise InputError(
            f"{folder}: target_vocab_size must be null, since relpos's commands use one tokenizer for both "
            f"languages; got {model.config.target_vocab_size}. Load it with transformers."
        )
    tokenizer = load_tokenizer(folder)
    size = model.config.vocab_size
    if max(tokenizer.get_vocab().values(), default=0) >= size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer):,} subwords and the model {size:,}; they "
            "do not belong together. Copy or train the model again."
        )
    return model.eval(), tokenizer
