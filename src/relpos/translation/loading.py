"""A model from a folder, be it a stranger's: whole, or one sentence that says what is wrong with it."""

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

# what a model's folder consists of
_FILES = (
    *("config.json", "generation_config.json", "recipe.yaml"),
    *("model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


def load_model(folder: Path) -> tuple[RelposForConditionalGeneration, PreTrainedTokenizerFast]:
    """The model in `folder` (or `folder`/model) in evaluation mode, and its tokenizer.

    A folder that is whole but was changed after it was sealed, as by fine-tuning in place, loads with a
    warning. Large files are told by their sizes and by samples; `verify` reads them whole.

    Raises:
        InputError: not a relpos model, or damaged.
    """
    folder = find_model(folder)
    found = changes(folder)
    for change in found:
        # weights may have moved into shards, or out of them: what is needed is found out below
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
            f"{found[0].path}: {found[0].told}. The model no longer matches its seal, and is loaded as it "
            f"is; if the change is yours, as by fine-tuning, seal it anew with: relpos seal {folder}",
            RelposWarning,
            stacklevel=2,
        )
    return model, tokenizer


def seal_model(folder: Path) -> Path:
    """Seal the model in `folder` (or `folder`/model) as it is now; returns its own folder.

    Raises:
        InputError: not a relpos model, damaged, or with a seal.json that is none of ours.
    """
    folder = find_model(folder)
    _load(folder)
    # a person's files beside the model are none of it
    before = read_seal(folder) if is_sealed(folder) else {}
    seal(folder, lambda name: name in before or any(fnmatch(name, each) for each in _FILES), by="user")
    return folder


def check_seal(folder: Path) -> Path:
    """Compare every byte of the model in `folder` (or `folder`/model) with its seal; returns its own folder.

    Raises:
        InputError: no relpos model, without a seal, or not as it was sealed.
    """
    folder = find_model(folder)
    if not is_sealed(folder):
        raise InputError(f"{folder}: has no seal. Make one with: relpos seal {folder}")
    try:
        verify(folder)
    except InputError as error:
        raise InputError(f"{error} If the change is yours, seal it anew with: relpos seal {folder}") from None
    return folder


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' bar over the weights: a library does not print."""
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
        with _no_bars():
            model = RelposForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: the model cannot be read ({first_line(error)}).") from error
    tokenizer = load_tokenizer(folder)
    size = model.config.vocab_size
    if max(tokenizer.get_vocab().values(), default=0) >= size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer):,} subwords and the model {size:,}; they "
            "do not belong together. Copy or train the model again."
        )
    return model.eval(), tokenizer
