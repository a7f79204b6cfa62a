"""Reads generation_config.json of a model: the settings of the search, after checks."""

import warnings
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from relpos.translation.config import RelposConfig, token_rules
from relpos.translation.errors import ModelFolderError, RelposWarning, list_names
from relpos.translation.setting_ranges import LENGTH_PENALTIES, TEMPERATURES
from relpos.translation.strict_json import read_object
from relpos.translation.validators import (
    Rule,
    boolean,
    check,
    either,
    integer,
    number,
    one_of,
    optional,
)

_NAME = "generation_config.json"
_MOST_TOKENS = 2**20
_MOST_BEAMS = 1000  # in a file; --beams may be as large as the vocabulary

_RULES: dict[str, Rule] = {
    "do_sample": boolean(),
    "use_cache": boolean(),
    "early_stopping": either(boolean(), one_of("never")),
    "length_penalty": number(*LENGTH_PENALTIES),
    "temperature": number(*TEMPERATURES),
    "top_k": integer(0, 2**31),
    "top_p": number(0, 1),
    "repetition_penalty": number(1e-3, 1000),
    "no_repeat_ngram_size": integer(0, _MOST_TOKENS),
    **dict.fromkeys(("max_length", "max_new_tokens"), integer(1, _MOST_TOKENS)),
    **dict.fromkeys(("min_length", "min_new_tokens"), integer(0, _MOST_TOKENS)),
    "_from_model_config": boolean(),
}
# keys that transformers always writes and relpos does not use
_KNOWN = ("transformers_version",)


def read_generation_settings(folder: Path, config: RelposConfig) -> GenerationConfig:
    """The defaults of `generate`.

    These keys are used: num_beams, length_penalty, early_stopping, the limits of length, do_sample,
    temperature, top_k, top_p, repetition_penalty, no_repeat_ngram_size, use_cache and the ids of special
    tokens, which default to those of `config`. All others, which could select another search or custom
    code, are ignored, with a warning if they are set.

    Raises:
        ModelFolderError: a value has a wrong type or is out of range; names the file and the key.
    """
    path = folder / _NAME
    given = read_object(path) if path.exists() or path.is_symlink() else {}
    tokens = token_rules(config)
    most = min(_MOST_BEAMS, config.decoder_vocab_size)
    rules = {
        name: optional(rule) for name, rule in (_RULES | tokens | {"num_beams": integer(1, most)}).items()
    }
    try:
        check(given, rules)
        ignored = [name for name in given if name not in rules and name not in _KNOWN and given[name]]
        if ignored:
            warnings.warn(
                f"{path}: settings that relpos does not support are ignored: {list_names(ignored)}.",
                RelposWarning,
                stacklevel=2,
            )
        # `generate` returns tokens alone unless its caller asks for more, whatever the configuration says
        taken: dict[str, Any] = dict.fromkeys(("output_attentions", "output_hidden_states"), False)
        taken |= {name: getattr(config, name) for name in tokens} | {
            name: value for name, value in given.items() if name in rules and value is not None
        }
        return GenerationConfig(**taken)
    except ValueError as error:
        raise ModelFolderError(f"{path}: {error}") from error
