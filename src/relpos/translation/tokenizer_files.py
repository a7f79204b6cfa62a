"""Loads and checks the tokenizer of a model: tokenizer.json and tokenizer_config.json."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from relpos.translation.errors import ModelFolderError, first_line
from relpos.translation.strict_json import MEBIBYTE, parse_object, read_bytes, read_object
from relpos.translation.validators import (
    Rule,
    boolean,
    check,
    dict_of,
    either,
    list_of,
    one_of,
    optional,
    text,
)

_SETTINGS = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_LARGEST = 256 * MEBIBYTE
_MOST_GROWTH = 4096

_TOKEN = either(text(), dict_of(text(), optional(either(text(), boolean())), 10))
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("pad_token", "eos_token"), _TOKEN),
    **dict.fromkeys(("bos_token", "unk_token", "sep_token", "cls_token", "mask_token"), optional(_TOKEN)),
    "extra_special_tokens": optional(either(list_of(_TOKEN, 0, 10_000), dict_of(text(), _TOKEN, 10_000))),
    "model_max_length": Rule(
        "a number from 1 on, or null",
        lambda value: value is None or (type(value) in (int, float) and 1 <= value < math.inf),
    ),
    **dict.fromkeys(("padding_side", "truncation_side"), one_of("left", "right")),
    **dict.fromkeys(("clean_up_tokenization_spaces", "split_special_tokens"), boolean()),
}


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder` by `save_pretrained`.

    tokenizer.json has the tokenizer itself; the roles of special tokens, the padding side and similar
    settings come from tokenizer_config.json, whose other settings are ignored.

    Raises:
        ModelFolderError: a file is missing or damaged, or a value has a wrong type or is out of range.
    """
    settings = read_object(folder / _SETTINGS, 64 * MEBIBYTE)
    if "additional_special_tokens" in settings:
        # the name before transformers 5
        settings.setdefault("extra_special_tokens", settings["additional_special_tokens"])
    try:
        for name in ("pad_token", "eos_token"):
            settings.setdefault(name, None)
        check(settings, _RULES)
    except ValueError as error:
        raise ModelFolderError(f"{folder / _SETTINGS}: {error}") from error
    path = folder / _TOKENIZER
    content = read_bytes(path, _LARGEST)
    _check_growth(path, parse_object(path, content, is_deep=True))
    try:
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_buffer(content),
            name_or_path=str(folder),
            model_input_names=["input_ids", "attention_mask"],
            **{name: _plain(settings[name]) for name in _RULES if settings.get(name) is not None},
        )
    except BaseException as error:
        # a panic in `tokenizers` is a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFolderError(f"{folder}: the tokenizer cannot be read ({first_line(error)}).") from error


def _plain(value: Any) -> Any:
    """Tokens by their text; tokenizer.json says how they match."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {k: _plain(v) for k, v in value.items()}
    return [_plain(token) for token in value] if isinstance(value, list) else value


def _check_growth(path: Path, content: dict[str, Any]) -> None:
    """Refuse replacements that together lengthen a text beyond bounds."""
    growth = 1
    for part in _parts([content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
        texts = [part.get(key) for key in ("content", "prepend", "replacement")]
        growth *= 1 + max((len(text) for text in texts if isinstance(text, str)), default=0)
        if growth > _MOST_GROWTH:
            raise ModelFolderError(
                f"{path}: replacements must lengthen a text at most {_MOST_GROWTH:,} times. Do not use it."
            )


def _parts(values: list[Any]) -> Iterator[dict[str, Any]]:
    """Every object in `values`, at any depth."""
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
