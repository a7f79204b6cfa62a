"""Prepares the data of a recipe: clean text, its parts, the tokenizer, and encoded pairs."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow
from transformers import PreTrainedTokenizerFast

from relpos.translation.atomic_files import write_folder_atomic, write_text_atomic
from relpos.translation.corpora import (
    Source,
    check_corpus,
    clean,
    join_corpora,
    read_corpus,
    recall_corpus,
    split,
)
from relpos.translation.errors import InputError
from relpos.translation.generation import MOST_SUBWORDS
from relpos.translation.recipe import DataSettings, Recipe, placed
from relpos.translation.run_cleanup import TABLES, remove_tables
from relpos.translation.strict_json import MEBIBYTE, read_object
from relpos.translation.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """Data and tokenizer of one run. `summary` counts the pairs kept, dropped by reason, and in each part."""

    train: datasets.Dataset  # input_ids, labels, length (subwords, the longer side)
    validation: datasets.Dataset  # source, target, input_ids, labels, length
    test: datasets.Dataset  # source, target
    tokenizer: PreTrainedTokenizerFast
    summary: dict


def prepare(recipe: Recipe, run: Path, report: Callable[[str], None]) -> Prepared:
    """Read, clean and split the corpora, train or load the tokenizer, and encode the pairs.

    Tables are cached in `run`/cache and the tokenizer is saved in `run`/tokenizer. Damaged tables are
    rebuilt.

    Raises:
        InputError: a corpus cannot be read, or too few of its pairs remain.
    """
    report("reading the corpora")
    return _from_sound_tables(run / "cache", lambda: _prepare(recipe, run, report))


def _prepare(recipe: Recipe, run: Path, report: Callable[[str], None]) -> Prepared:
    parts, summary = _read_parts(recipe.data, run / "cache")
    for line in summary["cleaning"]:
        report(line)
    folder = run / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
    else:
        report(f"learning {recipe.tokenizer.vocabulary:,} subwords")
        tokenizer = train_tokenizer(_Texts(parts["train"]), recipe.tokenizer.vocabulary)
        _save_tokenizer(tokenizer, folder)
    train = _encode(parts["train"], tokenizer, recipe.training.max_length)
    summary["too_long"] = len(parts["train"]) - len(train)
    if not len(train):
        raise InputError(
            f"no training pair has at most training.max_length = {recipe.training.max_length} subwords."
        )
    summary["tokens"] = {"source": _count(train, "input_ids"), "target": _count(train, "labels")}
    write_text_atomic(run / "data.json", json.dumps(summary, indent=1, ensure_ascii=False))
    report(
        f"{len(train):,} pairs to train on ({summary['too_long']:,} longer ones dropped), "
        f"{len(parts['validation']):,} to validate, {len(parts['test']):,} to test"
    )
    validation = _encode(parts["validation"], tokenizer, None)
    is_learned = recipe.model.absolute_positions == "learned"
    _check_lengths(validation, recipe.model.max_positions if is_learned else None)
    return Prepared(
        train=train.remove_columns(["source", "target"]),
        validation=validation,
        test=parts["test"],
        tokenizer=tokenizer,
        summary=summary,
    )


def check_corpora(data: DataSettings) -> None:
    """Check every corpus of a recipe by reading its first pair. Writes nothing. Raises: InputError."""
    for sources in data.sources.values():
        for source in sources:
            check_corpus(placed(source, data.folder), data.source_language, data.target_language)


def read_parts(data: DataSettings, cache: Path) -> tuple[dict[str, datasets.Dataset], dict]:
    """The parts train, validation and test of a recipe's corpora, and a summary of the cleaning.

    Tables in `cache` are used even if the corpora have changed since.

    Raises:
        InputError: a corpus cannot be read, or a part is empty.
    """
    return _from_sound_tables(cache, lambda: _read_parts(data, cache))


def _read_parts(data: DataSettings, cache: Path) -> tuple[dict[str, datasets.Dataset], dict]:
    def read(sources: list[Source]) -> datasets.Dataset:
        return join_corpora([_read_once(source, data, cache) for source in sources])

    cleaned, cleaning = clean(read(data.train), data.cleaning)
    held_out = {
        name: share
        for name, share, given in (
            ("validation", data.validation_share, data.validation),
            ("test", data.test_share, data.test),
        )
        if share and not given
    }
    parts = split(cleaned, held_out, data.seed) if held_out else {"train": cleaned}
    for name, given in (("validation", data.validation), ("test", data.test)):
        if given:
            parts[name] = read(given)
        parts.setdefault(name, cleaned.select([]))
    for name in ("train", "validation"):
        if not len(parts[name]):
            advice = "give more text"
            if name == "validation":
                advice += ", or corpora under data.validation"
            if not cleaning.kept and cleaning.dropped:
                advice = "change data.cleaning, or give other text"
            raise InputError(
                f"the {name} part of the corpus is empty: {'; '.join(cleaning.lines())}; {advice}."
            )
    summary = {
        "kept": cleaning.kept,
        "dropped": cleaning.dropped,
        "cleaning": str(cleaning).splitlines(),
        "pairs": {name: len(part) for name, part in parts.items()},
    }
    return parts, summary


def _read_once(source: Source, data: DataSettings, cache: Path) -> datasets.Dataset:
    """The table of a corpus, read once and then taken from the cache."""
    languages = data.source_language, data.target_language
    key = hashlib.sha256(json.dumps([source.model_dump(mode="json"), languages]).encode()).hexdigest()
    tables = cache / TABLES
    memory = tables / "tables.json"
    try:
        known = read_object(memory, 16 * MEBIBYTE)
    except InputError:
        known = {}
    table = recall_corpus(source, known[key], tables) if key in known else None
    if table is None:
        table = read_corpus(placed(source, data.folder), *languages, tables)
        write_text_atomic(memory, json.dumps(known | {key: table._fingerprint}, indent=1))
    table.data.validate(full=True)
    return table


def _from_sound_tables(cache: Path, read: Callable[[], _T]) -> _T:
    """The result of `read`; damaged tables in `cache` are rebuilt.

    Raises:
        InputError: the tables are damaged and cannot be rebuilt.
    """
    try:
        return read()
    except InputError:
        # some InputErrors are also ValueErrors, but do not mean that the tables are damaged
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        remove_tables(cache)
        try:
            return read()
        except InputError as missing:
            raise InputError(f"{cache} is damaged, and its text cannot be read again: {missing}") from error


def _encode(
    pairs: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int | None
) -> datasets.Dataset:
    """`pairs` with columns input_ids, labels and length, without pairs longer than `max_length`."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        source, target = tokenizer(batch["source"]).input_ids, tokenizer(batch["target"]).input_ids
        lengths = [max(len(s), len(t)) for s, t in zip(source, target, strict=True)]
        columns = {**batch, "input_ids": source, "labels": target, "length": lengths}
        keep = [row for row, length in enumerate(lengths) if max_length is None or length <= max_length]
        return {name: [column[row] for row in keep] for name, column in columns.items()}

    encoded = pairs.select_columns(["source", "target"])
    rows = encoded.map(encode, batched=True, desc="Encoding", remove_columns=encoded.column_names)
    rows.data.validate(full=True)
    return rows


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    write_folder_atomic(folder, lambda draft: save_tokenizer(tokenizer, draft), is_ours=lambda path: False)


def _check_lengths(validation: datasets.Dataset, max_positions: int | None) -> None:
    for number, length in enumerate(validation["length"], start=1):
        if max_positions is None and length > MOST_SUBWORDS:
            raise InputError(
                f"validation pair {number} must have at most {MOST_SUBWORDS} subwords; got {length}. "
                "Split the pair, or remove it."
            )
        if max_positions is not None and length > max_positions:
            raise InputError(
                f"validation pair {number} must have at most model.max_positions = {max_positions} subwords, "
                f"since positions are learned; got {length}. Raise max_positions, or remove the pair."
            )


class _Texts:
    """An iterable over both sides of all pairs, batch by batch; the text is not held in memory."""

    def __init__(self, pairs: datasets.Dataset) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[str]:
        for batch in self.pairs.iter(1000):
            yield from batch["source"]
            yield from batch["target"]


def _count(rows: datasets.Dataset, column: str) -> int:
    return sum(len(ids) for batch in rows.iter(10_000) for ids in batch[column])
