"""Recipes: everything that decides a training run, as YAML checked by pydantic.

A key that does not exist is answered with the nearest one that does. Any key can also be given as an
override, `training.updates=100`.
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
from relpos.translation.corpora import CleaningRules, Source
from relpos.translation.corpora.file_signatures import binary_format
from relpos.translation.errors import RelposWarning, UsageError
from relpos.translation.recipe_errors import sentences, shown
from relpos.translation.setting_ranges import LENGTH_PENALTIES, SMALLEST_VOCABULARY
from relpos.translation.strict_yaml import MOST_BYTES, Dumper, YamlTextError, read_yaml

_DecayRate = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DataSettings(_Section):
    """Where the text comes from."""

    source_language: str = Field(default="en", description="Language tag of the source side.")
    target_language: str = Field(default="de", description="Language tag of the target side.")
    folder: Path = Field(
        default=Path("."),
        strict=False,
        description="Relative paths below are taken from this folder; itself from the recipe's file, or "
        "from the working folder if given as an option.",
    )
    train: list[Source] = Field(min_length=1, description="Corpora to learn from.")
    validation: list[Source] = Field(default=[], description="Corpora to watch; empty: a share of `train`.")
    test: list[Source] = Field(
        default=[], description="Corpora to score in the end; empty: a share of `train`."
    )
    validation_share: float = Field(
        default=0.02, ge=0, lt=0.5, description="Used where `validation` is empty."
    )
    test_share: float = Field(default=0.02, ge=0, lt=0.5, description="Used where `test` is empty.")
    cleaning: CleaningRules = Field(
        default_factory=CleaningRules, description="What is dropped from `train` before it is split."
    )
    seed: int = Field(default=0, description="Of the split. The same seed gives the same split.")

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
        description="Subwords, 256 bytes and 4 marks among them.",
    )


class ModelSettings(_Section):
    """Sizes and positions, as in RelposConfig."""

    d_model: int = Field(default=512, gt=0, le=2**20, description="Width.")
    encoder_layers: int = Field(default=6, gt=0, le=1000, description="Layers of the encoder.")
    decoder_layers: int = Field(default=6, gt=0, le=1000, description="Layers of the decoder.")
    num_heads: int = Field(default=8, gt=0, description="Attention heads; divides d_model.")
    d_ff: int = Field(default=1024, gt=0, le=2**20, description="Width inside the feed-forward networks.")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="On embeddings and on what each block adds.")
    attention_dropout: float = Field(default=0.1, ge=0, lt=1, description="On attention weights.")
    activation_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Inside the feed-forward networks."
    )
    activation: Literal["relu", "gelu", "silu"] = Field(
        default="relu", description="Of the feed-forward networks."
    )
    norm_first: bool = Field(
        default=True, description="Normalise before each block (true) or after it (false)."
    )
    absolute_positions: Literal["none", "sinusoidal", "learned"] = Field(
        default="none", description="Positions added to the embeddings."
    )
    max_positions: int = Field(default=512, gt=0, le=2**20, description="Rows of a learned table, tokens.")
    relative_max_distance: int | Annotated[tuple[int, int], Field(strict=False)] | None = Field(
        default=16, description="k, [left, right], or null for no relative positions."
    )
    relative_keys: bool = Field(default=True, description="Distances act on the keys (equation 4).")
    relative_values: bool = Field(default=True, description="Distances act on the values (equation 3).")
    relative_per_head: bool = Field(
        default=False, description="One table per head, or one for all heads of a layer."
    )

    @field_validator("relative_max_distance", mode="before")
    @classmethod
    def _is_distance(cls, given: Any) -> Any:
        """Told here as one fault, and not as one for each kind that it might be."""
        sides = () if given is None else given if isinstance(given, list | tuple) else (given,)
        is_pair = len(sides) == 2 or not isinstance(given, list | tuple)
        if not is_pair or not all(type(side) is int and side >= 0 for side in sides):
            raise ValueError(f"must be null, k >= 0 or [left, right]; got {shown(given)}")
        if any(side > 2**20 for side in sides):
            raise ValueError(f"must be at most {2**20:,}; got {shown(given)}")
        return given

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelSettings":
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads must divide d_model = {self.d_model}; got {self.num_heads}")
        return self


class TrainingSettings(_Section):
    """How long, how fast, and what is kept."""

    seed: int = Field(default=1, ge=0, lt=2**32, description="Of weights, dropout and the order of batches.")
    updates: int = Field(default=100_000, gt=0, description="Optimiser steps at most.")
    minutes: float | None = Field(
        default=None, gt=0, description="Stop after this time, validation included; null: no limit."
    )
    tokens_per_batch: int = Field(
        default=4096, gt=0, description="Source or target tokens in a batch, with padding."
    )
    max_length: int = Field(
        default=128, gt=1, description="Longer training pairs are dropped, subwords a side."
    )
    accumulation: int = Field(default=1, gt=0, description="Batches per optimiser step and process.")
    warmup: int = Field(default=4000, gt=0, description="Updates in which the learning rate rises.")
    learning_rate_scale: float = Field(
        default=1.0, gt=0, description="s in s * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)."
    )
    adam_betas: tuple[_DecayRate, _DecayRate] = Field(
        default=(0.9, 0.98), strict=False, description="Adam's two decay rates."
    )
    adam_epsilon: float = Field(default=1e-9, gt=0, description="Adam's epsilon.")
    max_gradient_norm: float = Field(
        default=0.0, ge=0, description="Longer gradients are shortened; 0: never."
    )
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="Of the training loss.")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="bfloat16 means autocast."
    )
    log_every: int = Field(default=50, gt=0, description="Updates between lines of the log.")
    evaluate_every: int = Field(
        default=1000, gt=0, description="Updates between validations, each with a checkpoint."
    )
    best: Literal["loss", "bleu", "chrf"] = Field(
        default="bleu", description="The validation score that chooses."
    )
    patience: int | None = Field(
        default=None, gt=0, description="Stop after so many validations without a better one."
    )
    keep: int = Field(default=3, gt=0, description="Latest checkpoints kept besides the best.")
    average: int = Field(
        default=1,
        gt=0,
        description="Last checkpoints whose weights are averaged in the end; the average becomes the model "
        "only where its validation score is no worse than that of the best single checkpoint.",
    )
    validation_pairs: int = Field(
        default=1000, gt=0, description="Validation pairs translated each time, at most."
    )


class TranslationSettings(_Section):
    """Defaults that the model carries for translating."""

    beams: int = Field(default=4, gt=0, le=300, description="Hypotheses kept at each step; 1 is greedy.")
    length_penalty: float = Field(
        default=0.6,
        ge=LENGTH_PENALTIES[0],
        le=LENGTH_PENALTIES[1],
        description="Exponent on the length that divides a score.",
    )


class Recipe(_Section):
    """One training run."""

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
    """Names of the recipes that come with relpos."""
    folder = resources.files("relpos") / "recipes"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, or one that comes with relpos by its name, and apply `key.key=value` overrides.

    Paths in a file start at its folder, those of overrides and of packaged recipes at the working folder.

    Raises:
        UsageError: no such file, not YAML, an unknown key (with the nearest known one) or a wrong value.
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
        raise UsageError(f"no recipe {name!r}: give a YAML file, or one that comes with relpos: {known}.")
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
    """`data` with a folder that is absolute, and paths that the command line gives without one as well."""
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
    """`source` with its paths starting at `folder`."""
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
    """The recipe that `values` hold; `name` is used in messages."""
    try:
        return Recipe.model_validate(values)
    except pydantic.ValidationError as error:
        raise UsageError(sentences(error, Recipe, name)) from None


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every key of `recipe`, defaults included; an older file is replaced at once or not at all.

    The folder of its data is written as an absolute path, so that the file may be read anywhere.
    """
    write_text_atomic(path, recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """`recipe` as `write_recipe` writes it."""
    values = located(recipe).model_dump(mode="json")
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def located(recipe: Recipe) -> Recipe:
    """`recipe` with the folder of its data as an absolute path, seen from the working folder."""
    folder = Path.cwd() / recipe.data.folder.expanduser()
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": folder})})


def explain_recipe(recipe: Recipe) -> str:
    """`recipe` as YAML with what every key means beside it."""
    lines = [f"format: {recipe.format}"]
    for name in ("data", "tokenizer", "model", "training", "translation"):
        section = getattr(recipe, name)
        lines += ["", f"{name}:  # {(type(section).__doc__ or '').splitlines()[0]}"]
        lines += _explain_keys(section, "  ")
    lines += ["", "# What an entry of data.train, validation or test may hold:"]
    lines += [f"#   {key}: {field.description}" for key, field in Source.model_fields.items()]
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
                f"{path}: no recipe, for it has {size:,} bytes and {MOST_BYTES:,} are the most; "
                "name a YAML file."
            )
        content = path.read_bytes()
        if kind := binary_format(content):
            raise UsageError(f"{path} {kind}, as a recipe in YAML.")
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
