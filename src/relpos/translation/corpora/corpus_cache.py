"""Corpora as memory-mapped tables with the columns `source` and `target`, cached in a folder.

A table's name in the cache is a hash of the corpus's specification and of the path, size and time of each
file, so a corpus is read again only when it changes. `datasets` writes into a temporary folder and renames it
at the end, so an interrupted write is never taken for a finished table.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from relpos.translation.corpora.catalogs import find_catalogs, read_catalogs
from relpos.translation.corpora.corpus_spec import Source
from relpos.translation.corpora.hub import first_rows, load, read_rows
from relpos.translation.corpora.numbers import write_numbers
from relpos.translation.corpora.readers import read_aligned, read_jsonl, read_tsv
from relpos.translation.corpora.text_lines import check_is_file
from relpos.translation.errors import InputError
from relpos.translation.text import normal

# raise it when the readers yield other pairs, so that older cached tables are not reused
_READERS_VERSION = 2

_FIELDS = ("source", "target")


def read_corpus(source: Source, source_language: str, target_language: str, cache: Path) -> datasets.Dataset:
    """Read one corpus into a memory-mapped table with the columns `source` and `target`.

    Texts are normalised, see `text.normal`. No pair is dropped; see `clean`.

    Args:
        source: where the pairs come from; `numbers` adds a column `items`, the count of numbers in the line.
        source_language, target_language: tags such as `en`, `de` or `de-AT`.
        cache: folder for the tables; created if missing.
    Raises:
        InputError: the corpus cannot be read or is empty, or the cache folder cannot be created.
        OSError: the table cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be created: {error.strerror}; choose another one."
        ) from error
    opened = _open(source, source_language, target_language, cache)
    spec = source.model_dump(mode="json", exclude_none=True)
    key = json.dumps([_READERS_VERSION, spec, source_language, target_language, opened.key], sort_keys=True)
    columns = ("source", "target", "items") if source.numbers else ("source", "target")

    name = f"a text of the corpus {source}"

    def rows() -> Iterator[dict[str, Any]]:
        count = 0
        for left, right, *items in islice(opened.pairs(), source.limit):
            count += 1
            values = (normal(left, name), normal(right, name), *items)
            yield dict(zip(columns, values, strict=True))
        if not count:
            raise InputError(_empty(source))

    return _table(source, rows, cache, hashlib.sha256(key.encode()).hexdigest()[:16])


def recall_corpus(source: Source, fingerprint: str, cache: Path) -> datasets.Dataset | None:
    """The table that `read_corpus` wrote to `cache`, by its fingerprint; None if it is missing.

    The corpus itself may have changed or been removed since.
    """

    def rows() -> Iterator[dict[str, Any]]:
        raise InputError(f"the table {fingerprint} of {source} is missing.")
        yield

    try:
        return _table(source, rows, cache, fingerprint)
    except InputError:
        return None


def check_corpus(source: Source, source_language: str, target_language: str) -> None:
    """Check that a corpus exists, by reading its first pair. Writes nothing.

    Raises:
        InputError: the corpus is missing, cannot be read, or is empty.
    """
    if source.dataset is not None:
        pairs = first_rows(source.dataset, source.config, source.split or "train", source.fields or _FIELDS)
    else:
        pairs = _open(source, source_language, target_language, Path()).pairs()
    if next(iter(pairs), None) is None:
        raise InputError(_empty(source))


def _table(
    source: Source, rows: Callable[[], Iterator[dict[str, Any]]], cache: Path, fingerprint: str
) -> datasets.Dataset:
    """The table with this fingerprint in `cache`, written from `rows` if it is missing."""
    columns = {"source": "string", "target": "string"} | ({"items": "int32"} if source.numbers else {})
    try:
        return datasets.Dataset.from_generator(
            rows,
            features=datasets.Features({name: datasets.Value(kind) for name, kind in columns.items()}),
            cache_dir=str(cache),
            fingerprint=fingerprint,
        )
    except DatasetGenerationError as error:
        # the readers raise InputError only, so an OSError comes from writing the table
        if isinstance(error.__cause__, InputError | OSError):
            raise error.__cause__ from None
        raise


def _empty(source: Source) -> str:
    return f"the corpus {source} has no pair; check that it is the right one."


def join_corpora(tables: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Concatenate tables, keeping the columns that all of them have.

    Raises:
        InputError: `tables` is empty.
    """
    if not tables:
        raise InputError(
            "no corpus was given; give at least one of tsv, files, jsonl, dataset, catalogs, numbers."
        )
    shared = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    return datasets.concatenate_datasets([table.select_columns(shared) for table in tables])


@dataclass(frozen=True)
class _Opened:
    """A corpus that exists: a function that yields its pairs, and a key that changes with its content."""

    pairs: Callable[[], Iterator[tuple[Any, ...]]]
    key: list[Any]


def _open(source: Source, source_language: str, target_language: str, cache: Path) -> _Opened:
    """Locate a corpus without reading it. Raises: InputError."""
    if source.tsv is not None:
        path, columns = source.tsv, source.columns or (0, 1)
        return _Opened(lambda: read_tsv(path, columns), _state([path]))
    if source.files is not None:
        left, right = source.files
        return _Opened(lambda: read_aligned(left, right), _state([left, right]))
    if source.jsonl is not None:
        path, fields = source.jsonl, source.fields or _FIELDS
        return _Opened(lambda: read_jsonl(path, fields), _state([path]))
    if source.dataset is not None:
        name, fields = source.dataset, source.fields or _FIELDS
        loaded = load(name, source.config, source.split or "train", cache)
        return _Opened(lambda: read_rows(loaded, name, fields), [loaded._fingerprint])
    if source.catalogs is not None:
        paths = find_catalogs(source.catalogs, source_language, target_language)
        return _Opened(lambda: read_catalogs(paths, target_language), _state(paths))
    assert source.numbers is not None
    numbers = source.numbers
    return _Opened(lambda: write_numbers(numbers, source_language, target_language), [_version("num2words")])


def _state(paths: Sequence[Path]) -> list[Any]:
    """Path, size and time of each file, so that a changed file has another key."""
    for path in paths:
        check_is_file(path)
    stats = [(path.resolve(), path.stat()) for path in paths]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
