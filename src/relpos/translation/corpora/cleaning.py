"""Cleaning parallel text: drops pairs that are useless or wrong, and counts them by reason."""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from relpos.translation.corpora.placeholders import placeholders, without_placeholders
from relpos.translation.corpora.timed_regex import compile_pattern, matches
from relpos.translation.corpora.words import count_characters, count_words
from relpos.translation.text import normal

# raise it when the rules change their decision on any pair, so that older cached tables are not reused
_VERSION = 2

_KEEP = "keep"
_DUPLICATE = "duplicate"
# the order of the checks: the first reason counts
_REASONS = (
    _KEEP,
    "empty side",
    "equal sides",
    "too few letters",
    "matches drop_matching",
    "placeholders differ",
    "too many placeholders",
    "ends differ",
    "length ratio",
    "too long",
    _DUPLICATE,
)

_REASON, _PAIR = "_reason", "_pair"

# the same ends in Chinese and Japanese, Arabic, and Indic scripts
_ENDS = str.maketrans("\u3002\uff01\uff1f\uff1a\u061f\u06d4\u0964", ".!?:?..")

# characters allowed on top of the ratio, since the lengths of short texts differ most
_SLACK = 15


class CleaningRules(BaseModel):
    """Conditions for keeping a pair. Kept texts are normalised, see `text.normal`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    drop_equal: bool = Field(default=True, description="Drop pairs whose sides are equal, apart from case.")
    drop_duplicates: bool = Field(default=True, description="Keep only the first of several equal pairs.")
    match_placeholders: bool = Field(
        default=True,
        description="Drop pairs whose sides differ in placeholders, tags, entities: %s, {name}, <b>, &amp;.",
    )
    match_ends: bool = Field(
        default=False,
        description="Drop pairs where one side ends with one of . ! ? : and the other with another or none.",
    )
    max_placeholders: int | None = Field(
        default=None,
        ge=0,
        description="Drop pairs with more placeholders on a side; 0 keeps plain text only.",
    )
    max_ratio: float | None = Field(
        default=3.0,
        ge=1.0,
        description="Drop pairs where one side has over this many times the characters of the other, plus "
        f"{_SLACK}.",
    )
    max_words: PositiveInt | None = Field(default=200, description="Drop pairs with more words on a side.")
    drop_matching: str | None = Field(
        default=None,
        description="Drop pairs where a side contains a match of this regular expression, for example `https?://`.",
    )
    min_letters: float = Field(
        default=0.4,
        ge=0.0,
        le=1.0,
        description="Drop pairs where a side has a smaller share of letters, not counting spaces.",
    )

    @field_validator("drop_matching")
    @classmethod
    def _is_regular_expression(cls, pattern: str | None) -> str | None:
        if pattern is not None and pattern.casefold() in ("none", "null"):
            raise ValueError(f"must be null or a regular expression; write (?:{pattern}) for the word")
        if pattern is not None:
            compile_pattern(pattern)
        return pattern


@dataclass(frozen=True)
class CleaningReport:
    """The number of pairs kept, and dropped for each reason; if several apply, the first counts."""

    kept: int
    dropped: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as lines for a person."""
        total = self.kept + sum(self.dropped.values())
        lines = [f"{self.kept:,} of {total:,} pairs kept"]
        return lines + [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def clean(
    dataset: datasets.Dataset, rules: CleaningRules | None = None
) -> tuple[datasets.Dataset, CleaningReport]:
    """The pairs that meet the rules, in their order, and a report of the dropped ones.

    Duplicates are found by a 64-bit hash of the pair, 8 bytes of memory each. Among 100 million different
    pairs the probability of a false duplicate is under 1 in 3,000.

    Args:
        dataset: with columns `source` and `target`; other columns are kept.
        rules: default `CleaningRules()`.
    """
    if not len(dataset):
        return dataset, CleaningReport(kept=0)
    rules = rules or CleaningRules()
    name = f"clean {_VERSION} {dataset._fingerprint} {rules.model_dump_json()}"
    judged = dataset.map(
        _judge,
        batched=True,
        fn_kwargs={"rules": rules},
        features=datasets.Features(
            {**dataset.features, _REASON: datasets.Value("int8"), _PAIR: datasets.Value("uint64")}
        ),
        new_fingerprint=hashlib.sha256(name.encode()).hexdigest()[:16],
        desc="Cleaning",
    )
    marks = judged.select_columns([_REASON, _PAIR]).with_format("numpy")
    reasons = np.array(marks[_REASON][:], dtype=np.int8)
    if rules.drop_duplicates:
        kept = np.flatnonzero(reasons == 0)
        _, first = np.unique(np.asarray(marks[_PAIR][:])[kept], return_index=True)
        is_repeated = np.ones(len(kept), dtype=bool)
        is_repeated[first] = False
        reasons[kept[is_repeated]] = _REASONS.index(_DUPLICATE)
    counts = np.bincount(reasons, minlength=len(_REASONS)).tolist()
    dropped = {reason: n for reason, n in zip(_REASONS, counts, strict=True) if n and reason != _KEEP}
    table = judged.remove_columns([_REASON, _PAIR])
    if dropped:
        table = table.select(np.flatnonzero(reasons == 0))
    return table, CleaningReport(kept=counts[0], dropped=dropped)


def _judge(batch: Mapping[str, Sequence[str]], rules: CleaningRules) -> dict[str, Any]:
    columns: dict[str, Any] = {"source": [], "target": [], _REASON: [], _PAIR: []}
    for source, target in zip(batch["source"], batch["target"], strict=True):
        source, target = normal(source), normal(target)
        columns["source"].append(source)
        columns["target"].append(target)
        columns[_REASON].append(_REASONS.index(_reason(source, target, rules)))
        # normalised text contains no line feed
        digest = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest()
        columns[_PAIR].append(int.from_bytes(digest, "little"))
    # without the dtype pyarrow would infer signed integers
    columns[_PAIR] = np.array(columns[_PAIR], dtype=np.uint64)
    return columns


def _reason(source: str, target: str, rules: CleaningRules) -> str:
    if not source or not target:
        return "empty side"
    if rules.drop_equal and source.casefold() == target.casefold():
        return "equal sides"
    if min(_letter_share(source), _letter_share(target)) < rules.min_letters:
        return "too few letters"
    if rules.drop_matching is not None and any(
        matches(rules.drop_matching, text, "data.cleaning.drop_matching") for text in (source, target)
    ):
        return "matches drop_matching"
    if rules.match_placeholders or rules.max_placeholders is not None:
        left, right = placeholders(source), placeholders(target)
        if rules.match_placeholders and left != right:
            return "placeholders differ"
        if rules.max_placeholders is not None and max(left.total(), right.total()) > rules.max_placeholders:
            return "too many placeholders"
    if rules.match_ends and _end(source) != _end(target):
        return "ends differ"
    lengths = count_characters(source), count_characters(target)
    if rules.max_ratio is not None and max(lengths) > rules.max_ratio * min(lengths) + _SLACK:
        return "length ratio"
    if rules.max_words is not None and max(count_words(source), count_words(target)) > rules.max_words:
        return "too long"
    return _KEEP


def _end(text: str) -> str:
    end = text[-1].translate(_ENDS)
    return end if end in ".!?:" else ""


def _letter_share(text: str) -> float:
    # a text that consists of placeholders has no letters
    characters = "".join(without_placeholders(text, "").split())
    # M: combining vowels and accents
    letters = sum(each.isalpha() or unicodedata.category(each)[0] == "M" for each in characters)
    return letters / len(characters) if characters else 0.0
