"""The specification of one corpus in a recipe: where its pairs come from."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from typing_extensions import Self

from relpos.translation.corpora.numbers import NumberLines

_KINDS = ("tsv", "files", "jsonl", "dataset", "catalogs", "numbers")

# YAML has no tuples or paths, so lists and text are accepted for them; all other types are strict
_Path = Annotated[Path, Field(strict=False)]
_Paths = Annotated[tuple[_Path, _Path], Field(strict=False)]
_Names = Annotated[tuple[str, str], Field(strict=False)]
_Numbers = Annotated[tuple[int, int], Field(strict=False)]

# options, and the kinds that they apply to
_OPTIONS = {
    "columns": ("tsv",),
    "fields": ("jsonl", "dataset"),
    "config": ("dataset",),
    "split": ("dataset",),
}


class Source(BaseModel):
    """One corpus of parallel text; exactly one of tsv, files, jsonl, dataset, catalogs and numbers is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tsv: _Path | None = Field(
        default=None, description="File of lines `source TAB target`, UTF-8, plain or gzipped."
    )
    columns: _Numbers | None = Field(
        default=None, description="For tsv: the columns of source and target, counted from 0; default [0, 1]."
    )
    files: _Paths | None = Field(default=None, description="Two line-aligned files, source and target.")
    jsonl: _Path | None = Field(
        default=None, description="File with one JSON object a line, plain or gzipped."
    )
    dataset: str | None = Field(
        default=None,
        description="Data set of the Hugging Face Hub, or a local folder that `datasets` can read.",
    )
    config: str | None = Field(
        default=None, description="For dataset: its configuration, for example `de-en`."
    )
    split: str | None = Field(default=None, description="For dataset: its split; default train.")
    fields: _Names | None = Field(
        default=None,
        description="For jsonl and dataset: the fields of source and target, for example [en, de] or "
        "[translation.en, translation.de]; default [source, target].",
    )
    catalogs: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Installed Python distributions whose gettext catalogs are read, for example [django].",
    )
    numbers: NumberLines | None = Field(default=None, description="Numbers in words, generated.")
    limit: PositiveInt | None = Field(default=None, description="Read this many pairs at most.")

    @property
    def kind(self) -> str:
        """The key that is set: tsv, files, jsonl, dataset, catalogs or numbers."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that the corpus is read from, without data set folders and installed catalogs."""
        if self.files is not None:
            return self.files
        return tuple(path for path in (self.tsv, self.jsonl) if path is not None)

    def __str__(self) -> str:
        value = getattr(self, self.kind)
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        return f"{self.kind}: {value}"

    @model_validator(mode="after")
    def _exactly_one_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"a corpus has exactly one of {', '.join(_KINDS)}; got {found}")
        for option, kinds in _OPTIONS.items():
            if getattr(self, option) is not None and given[0] not in kinds:
                raise ValueError(f"{option} belongs to {' and '.join(kinds)}, not to {given[0]}")
        if self.columns is not None and (min(self.columns) < 0 or self.columns[0] == self.columns[1]):
            raise ValueError(f"columns must be two different numbers >= 0; got {list(self.columns)}")
        return self
