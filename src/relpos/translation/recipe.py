"""Recipes: all settings of a training run, as YAML checked by pydantic.

An unknown key is an error that names the nearest known one. Overrides such as `training.updates=100` set
single keys.
"""

import os
import warnings
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from relpos.translation.atomic_files import write_text_atomic
from relpos.translation.corpora import CleaningRules, NumberLines, Source
from relpos.translation.corpora.file_signatures import binary_format
from relpos.translation.errors import RelposWarning, UsageError
from relpos.translation.recipe_errors import error_message, short_yaml
from relpos.translation.setting_ranges import LENGTH_PENALTIES, SMALLEST_VOCABULARY
from relpos.translation.strict_yaml import MOST_BYTES, Dumper, YamlTextError, read_yaml

_DecayRate = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DataSettings(_Section):
    """The corpora, and how they are cleaned and split."""

    source_language: str = Field(default="en", description="Language tag of the source side.")
    target_language: str = Field(default="de", description="Language tag of the target side.")
    folder: Path = Field(
        default=Path("."),
        strict=False,
        description="Folder of the relative paths below. If relative itself, it starts at the recipe's file, "
        "or at the working folder if given as an option.",
    )
    train: list[Source] = Field(min_length=1, description="Training corpora.")
    validation: list[Source] = Field(default=[], description="Validation corpora; empty: a share of `train`.")
    test: list[Source] = Field(default=[], description="Test corpora; empty: a share of `train`.")
    validation_share: float = Field(
        default=0.02, ge=0, lt=0.5, description="Share of `train` if `validation` is empty."
    )
    test_share: float = Field(default=0.02, ge=0, lt=0.5, description="Share of `train` if `test` is empty.")
    cleaning: CleaningRules = Field(
        default_factory=CleaningRules, description="Which pairs of `train` are dropped before the split."
    )
    seed: int = Field(default=0, description="Seed of the split.")

    @property
    def sources(self) -> dict[str, list[Source]]:
        """The corpora of each part."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


class TokenizerSettings(_Section):
    """Subwords shared by both languages."""

    vocabulary: int = Field(
        default=8000,
        ge=SMALLEST_VOCABULARY,
        le=2**20,
        description="Number of subwords, including 256 bytes and 4 special tokens.",
    )


class ModelSettings(_Section):
    """Sizes and positions of the model, as in RelposConfig."""

    d_model: int = Field(default=512, gt=0, le=2**20, description="Model width.")
    encoder_layers: int = Field(default=6, gt=0, le=1000, description="Layers of the encoder.")
    decoder_layers: int = Field(default=6, gt=0, le=1000, description="Layers of the decoder.")
    num_heads: int = Field(default=8, gt=0, description="Attention heads; divides d_model.")
    d_ff: int = Field(default=1024, gt=0, le=2**20, description="Width inside the feed-forward networks.")
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout of embeddings and of the output of each block."
    )
    attention_dropout: float = Field(default=0.1, ge=0, lt=1, description="Dropout of attention weights.")
    activation_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout inside the feed-forward networks."
    )
    activation: Literal["relu", "gelu", "silu"] = Field(
        default="relu", description="Activation of the feed-forward networks."
    )
    norm_first: bool = Field(
        default=True, description="Layer normalisation before each block (true) or after it (false)."
    )
    absolute_positions: Literal["none", "sinusoidal", "learned"] = Field(
        default="none", description="Positions added to the embeddings."
    )
    max_positions: int = Field(
        default=512, gt=0, le=2**20, description="Rows of the table of learned positions, tokens."
    )
    relative_max_distance: int | Annotated[tuple[int, int], Field(strict=False)] | None = Field(
        default=16, description="Clip distance k, or [left, right]; null for no relative positions."
    )
    relative_keys: bool = Field(default=True, description="Add relative positions to the keys (equation 4).")
    relative_values: bool = Field(
        default=True, description="Add relative positions to the values (equation 3)."
    )
    relative_per_head: bool = Field(
        default=False, description="One table per head (true) or one for all heads of a layer (false)."
    )

    @field_validator("relative_max_distance", mode="before")
    @classmethod
    def _is_distance(cls, given: Any) -> Any:
        """One error message, where pydantic would report one for each type of the union."""
        sides = () if given is None else given if isinstance(given, list | tuple) else (given,)
        is_pair = len(sides) == 2 or not isinstance(given, list | tuple)
        if not is_pair or not all(type(side) is int and side >= 0 for side in sides):
            raise ValueError(f"must be null, k >= 0 or [left, right]; got {short_yaml(given)}")
        if any(side > 2**20 for side in sides):
            raise ValueError(f"must be at most {2**20:,}; got {short_yaml(given)}")
        return given

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelSettings":
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads must divide d_model = {self.d_model}; got {self.num_heads}")
        return self


class TrainingSettings(_Section):
    """Duration, optimiser, validation and checkpoints."""

    seed: int = Field(
        default=1, ge=0, lt=2**32, description="Seed of initial weights, dropout and the order of batches."
    )
    updates: int = Field(default=100_000, gt=0, description="Maximum number of optimiser steps.")
    minutes: float | None = Field(
        default=None, gt=0, description="Time limit in minutes, validation included; null: no limit."
    )
    tokens_per_batch: int = Field(
        default=4096, gt=0, description="Source or target tokens in a batch, padding included."
    )
    max_length: int = Field(
        default=128, gt=1, description="Maximum subwords on a side; longer training pairs are dropped."
    )
    accumulation: int = Field(default=1, gt=0, description="Batches per optimiser step and process.")
    warmup: int = Field(default=4000, gt=0, description="Updates during which the learning rate rises.")
    learning_rate_scale: float = Field(
        default=1.0,
        gt=0,
        description="s in the learning rate s * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).",
    )
    adam_betas: tuple[_DecayRate, _DecayRate] = Field(
        default=(0.9, 0.98), strict=False, description="Adam's two decay rates."
    )
    adam_epsilon: float = Field(default=1e-9, gt=0, description="Adam's epsilon.")
    max_gradient_norm: float = Field(
        default=0.0, ge=0, description="Clip gradients to this norm; 0: no clipping."
    )
    label_smoothing: float = Field(
        default=0.1, ge=0, lt=1, description="Label smoothing of the training loss."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="float32, or bfloat16 by autocast."
    )
    log_every: int = Field(default=50, gt=0, description="Updates between log lines.")
    evaluate_every: int = Field(
        default=1000, gt=0, description="Updates between validations; each also saves a checkpoint."
    )
    best: Literal["loss", "bleu", "chrf"] = Field(
        default="bleu", description="Validation score that chooses the best checkpoint."
    )
    patience: int | None = Field(
        default=None, gt=0, description="Stop after this many validations without improvement; null: never."
    )
    keep: int = Field(default=3, gt=0, description="Number of latest checkpoints to keep, besides the best.")
    average: int = Field(
        default=1,
        gt=0,
        description="Number of last checkpoints to average at the end; the average becomes the model "
        "only if its validation score is at least as good as that of the best checkpoint.",
    )
    validation_pairs: int = Field(
        default=1000, gt=0, description="Maximum number of pairs translated in a validation."
    )


class TranslationSettings(_Section):
    """Default settings of the search, saved with the model."""

    beams: int = Field(default=4, gt=0, le=300, description="Beam size; 1 is greedy search.")
    length_penalty: float = Field(
        default=0.6,
        ge=LENGTH_PENALTIES[0],
        le=LENGTH_PENALTIES[1],
        description="Scores are divided by length^length_penalty.",
    )


class Recipe(_Section):
    """The settings of one training run."""

    format: Literal[1] = Field(default=1, description="Format of this file.")
    data: DataSettings
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    translation: TranslationSettings = Field(default_factory=TranslationSettings)

    @model_validator(mode="after")
    def _positions_suffice(self) -> "Recipe":
        longest, rows = self.training.max_length, self.model.max_positions
        if self.model.absolute_positions == "learned" and longest > rows:
            raise ValueError(
                f"training.max_length must be at most model.max_positions = {rows} where positions are "
                f"learned; got {longest}"
            )
        return self


def packaged_recipes() -> list[str]:
    """Names of the packaged recipes."""
    folder = resources.files("relpos") / "recipes"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from a file, or a packaged one by its name, and apply `key.key=value` overrides.

    Paths in a file are relative to its folder, paths in overrides and packaged recipes to the working folder.

    Raises:
        UsageError: the file is missing or not YAML, or a key is unknown or has a wrong value.
    """
    path = Path(name)
    if path.is_file():
        text = _read(path)
    elif name in packaged_recipes():
        text = (resources.files("relpos") / "recipes" / f"{name}.yaml").read_text("utf-8")
    elif path.exists():
        inside = path / "recipe.yaml"
        hint = f", such as {inside}" if inside.is_file() else ""
        raise UsageError(f"{name}: no regular file; give a YAML file{hint}.")
    else:
        known = ", ".join(packaged_recipes())
        raise UsageError(f"no recipe {name!r}: give a YAML file, or a packaged recipe: {known}.")
    try:
        values = read_yaml(text)
    except YamlTextError as error:
        line = f", line {error.line}" if error.line else ""
        raise UsageError(f"{name}{line}: not valid YAML ({error.problem}).") from None
    if not isinstance(values, dict):
        came = "nothing" if values is None else type(values).__name__
        raise UsageError(f"{name}: a recipe is a mapping of keys to values; got {came}.")
    for override in overrides or []:
        _apply(values, override)
    recipe = check_recipe(values, name)
    return recipe.model_copy(update={"data": _found(recipe.data, name, path, overrides or [])})


def _found(data: DataSettings, name: str, file: Path, overrides: list[str]) -> DataSettings:
    """`data` with an absolute folder, and absolute paths for parts given on the command line."""
    here = Path.cwd()
    given = {override.partition("=")[0] for override in overrides}
    if "data.folder" in given or not file.is_file():
        return data.model_copy(update={"folder": here / data.folder.expanduser()})
    folder = Path(os.path.abspath(file)).parent / data.folder.expanduser()
    changes: dict[str, Any] = {
        part: [placed(source, here) for source in getattr(data, part)] if f"data.{part}" in given else sources
        for part, sources in data.sources.items()
    }
    earlier = here / data.folder
    paths = [path for sources in changes.values() for source in sources for path in source.paths]
    missing = [path for path in paths if not (folder / path).exists()]
    if missing and all((earlier / path).exists() for path in missing):
        warnings.warn(
            f"{name}: {missing[0]} is not beside the recipe, in {folder}; it was found from the working "
            "folder, where earlier versions looked. Give --data.folder, or move the text.",
            RelposWarning,
            stacklevel=3,
        )
        folder = earlier
    return data.model_copy(update={"folder": folder, **changes})


def placed(source: Source, folder: Path) -> Source:
    """`source` with its paths relative to `folder` resolved."""
    moved: dict[str, Any] = {}
    for key in ("tsv", "jsonl"):
        if getattr(source, key) is not None:
            moved[key] = folder / getattr(source, key).expanduser()
    if source.files is not None:
        moved["files"] = tuple(folder / path.expanduser() for path in source.files)
    if source.dataset is not None and (folder / source.dataset).is_dir():
        moved["dataset"] = str(folder / source.dataset)
    return source.model_copy(update=moved)


def check_recipe(values: dict[str, Any], name: str) -> Recipe:
    """The recipe in `values`; `name` is its name in error messages. Raises: UsageError."""
    try:
        return Recipe.model_validate(values)
    except pydantic.ValidationError as error:
        raise UsageError(error_message(error, Recipe, name)) from None


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every key of `recipe`, including defaults; an existing file is replaced atomically.

    The data folder is written as an absolute path, so that the file can be read from anywhere.
    """
    write_text_atomic(path, recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """The text that `write_recipe` writes."""
    values = located(recipe).model_dump(mode="json")
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def located(recipe: Recipe) -> Recipe:
    """`recipe` with its data folder as an absolute path."""
    folder = Path.cwd() / recipe.data.folder.expanduser()
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": folder})})


def explain_recipe(recipe: Recipe) -> str:
    """`recipe` as YAML with a comment on every key."""
    lines = [f"format: {recipe.format}"]
    for name in ("data", "tokenizer", "model", "training", "translation"):
        section = getattr(recipe, name)
        lines += ["", f"{name}:  # {(type(section).__doc__ or '').splitlines()[0]}"]
        lines += _explain_keys(section, "  ")
    lines += ["", "# Keys of an entry of data.train, data.validation or data.test:"]
    for key, field in Source.model_fields.items():
        lines.append(f"#   {key}: {field.description}")
        if key == "numbers":
            lines += [
                f"#     {inner}: {each.description}" for inner, each in NumberLines.model_fields.items()
            ]
    return "\n".join(lines) + "\n"


def _explain_keys(section: BaseModel, indent: str) -> list[str]:
    lines = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{key}:  # {field.description}", *_explain_keys(value, indent + "  ")]
            continue
        plain = section.model_dump(mode="json", include={key}, exclude_none=isinstance(value, list))[key]
        text = yaml.dump(plain, Dumper=Dumper, default_flow_style=True, width=10_000, allow_unicode=True)
        lines.append(f"{indent}{key}: {text.splitlines()[0]}  # {field.description}")
    return lines


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(
                f"{path}: a recipe must have at most {MOST_BYTES:,} bytes; got {size:,}. Name a YAML file."
            )
        content = path.read_bytes()
        if kind := binary_format(content):
            raise UsageError(f"{path} {kind}; a recipe must be YAML.")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}. Save the recipe as UTF-8.") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from None


def _apply(values: dict[str, Any], override: str) -> None:
    if any("\ud800" <= sign <= "\udfff" for sign in override):
        raise UsageError(f"option --{override.partition('=')[0]}: its value is not UTF-8.")
    key, equals, text = override.partition("=")
    if not equals:
        raise UsageError(f"option --{key} needs a value: --{key} VALUE.")
    *sections, last = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UsageError(f"option --{key}: {section} holds one value, not further keys.")
    try:
        values[last] = read_yaml(text)
    except YamlTextError:
        values[last] = text
