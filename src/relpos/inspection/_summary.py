"""A summary of training and outcome, in sentences derived from the results alone.

Two scores are level if their difference may be chance: for a share of exact lines, if it lies in the 95 %
interval of a difference of shares; for BLEU and chrF, if it is below half a point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relpos.inspection._results import (
    METRICS,
    Result,
    first_given,
    items,
    main_metric,
    number,
    shown,
    variant_names,
)

LEVEL_POINTS = 0.5
_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}


def training_sentence(results: Sequence[Result]) -> str:
    """The task, the variants, their size, and the length of training."""
    names = variant_names(results)
    task = str(first_given(results, "title") or first_given(results, "task") or "a task")
    who = "One variant" if len(names) == 1 else f"{_WORDS.get(len(names), len(names))} variants"
    sentence = f"{who} ({_listed(names)}) {'was' if len(names) == 1 else 'were'} trained on “{task}”"
    unit, limit = str(first_given(results, "length_unit") or "length"), first_given(results, "trained_up_to")
    if isinstance(limit, (int, float)):
        sentence += f", on lines with up to {limit} {unit.removesuffix(' in the line')} only"
    size, updates, seconds = (_range_of(results, name) for name in ("weights", "updates", "seconds"))
    spent = [f"{text} {words}" for text, words in ((updates, "updates"), (seconds, "seconds")) if text]
    parts = [f"has {size} weights"] if size else []
    parts += [f"was trained for {' in '.join(spent)}"] if spent else []
    return f"{sentence}." + (f" Each {' and '.join(parts)}." if parts else "")


def outcome_sentences(results: Sequence[Result]) -> list[str]:
    """Compare the variants: overall, on lengths never trained on, and with the limits of the comparison."""
    metric = main_metric(results)
    overall = [
        _Score(name, value, number(result, "scores", "segments"))
        for name, result in zip(variant_names(results), results, strict=True)
        if (value := number(result, "scores", metric)) is not None
    ]
    if not overall:
        return ["No scores were recorded."]
    sentences = _compared(overall, metric, f"By {_metric_words(metric)}")
    sentences += _beyond(results, metric)
    if len(overall) > 1:
        sentences += _limits(results)
    return sentences


@dataclass(frozen=True)
class _Score:
    name: str
    value: float
    segments: float | None


def _compared(scores: list[_Score], metric: str, start: str) -> list[str]:
    if len(scores) == 1:
        only = scores[0]
        return [
            f"{start}, {only.name} scores {_amount(metric, only.value)}; "
            "there is no other variant to compare it with."
        ]
    ranked = sorted(scores, key=lambda score: -score.value)
    focus = next((score for score in scores if score.name == "relative"), ranked[0])
    others = [score for score in ranked if score is not focus]
    level = [other for other in others if _is_level(focus, other, metric)]
    ahead_of = [other for other in others if other not in level and other.value < focus.value]
    behind = [other for other in others if other not in level and other.value > focus.value]

    facts = [f"{focus.name} {_amount(metric, focus.value)}", *(_gap(focus, o, metric) for o in others)]
    return [f"{start}, {_verdict(focus, ahead_of, level, behind)}: {'; '.join(facts)}."]


def _verdict(focus: _Score, ahead_of: list[_Score], level: list[_Score], behind: list[_Score]) -> str:
    every = "every other variant" if len(ahead_of + level + behind) > 1 else None
    parts = [
        f"{words} {every if every and not rest else _listed([score.name for score in group])}"
        for words, group, rest in (
            ("better than", ahead_of, level + behind),
            ("level with", level, ahead_of + behind),
            ("worse than", behind, ahead_of + level),
        )
        if group
    ]
    return f"{focus.name} is {', '.join(parts)}"


def _gap(focus: _Score, other: _Score, metric: str) -> str:
    difference = (other.value - focus.value) * METRICS[metric][1]
    decimals = METRICS[metric][2]
    if round(abs(difference), decimals) == 0:
        how = "the same"
    else:
        how = f"{abs(difference):.{decimals}f} points {'more' if difference > 0 else 'less'}"
        if _is_level(focus, other, metric):
            how += ", which may be chance"
    return f"{other.name} {_amount(metric, other.value)} ({how})"


def _is_level(one: _Score, other: _Score, metric: str) -> bool:
    difference = abs(one.value - other.value)
    if metric != "exact":
        return difference < LEVEL_POINTS
    if not one.segments or not other.segments:
        return difference < LEVEL_POINTS / 100
    # half a success and half a failure added, so that shares of 0 and 1 have a variance
    variance = 0.0
    for score in (one, other):
        assert score.segments
        share = (score.value * score.segments + 0.5) / (score.segments + 1)
        variance += share * (1 - share) / score.segments
    return difference <= 1.96 * math.sqrt(variance)


def _beyond(results: Sequence[Result], metric: str) -> list[str]:
    limit = first_given(results, "trained_up_to")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        return []
    scores = []
    for name, result in zip(variant_names(results), results, strict=True):
        total = weight = 0.0
        for bucket in items(result, "buckets"):
            value, shortest = number(bucket, "scores", metric), number(bucket, "shortest")
            if value is not None and shortest is not None and shortest > limit:
                segments = number(bucket, "scores", "segments") or 1.0
                total, weight = total + value * segments, weight + segments
        if weight:
            scores.append(_Score(name, total / weight, weight))
    if not scores:
        return []
    unit = str(first_given(results, "length_unit") or "length")
    average = "" if metric == "exact" else ", averaged over the buckets"
    start = f"On lengths never trained on (more than {limit} {unit}{average}), by {_metric_words(metric)}"
    return _compared(scores, metric, start)


def _limits(results: Sequence[Result]) -> list[str]:
    """Differences in training, and missing repetitions, that limit the comparison."""
    sentences = []
    for field, words, tolerance in (("updates", "updates", 0.05), ("weights", "weights", 0.1)):
        known = _known(results, field)
        if known and max(known) > min(known) * (1 + tolerance):
            sentences.append(f"The variants are not alike in {words}: {_range_of(results, field)}.")
    variants = [str(result.get("variant")) for result in results]
    if len(set(variants)) == len(variants):
        sentences.append("Each variant was trained once; another seed would move these numbers.")
    return sentences


def _metric_words(metric: str) -> str:
    return "lines exactly right" if metric == "exact" else METRICS[metric][0]


def _amount(metric: str, value: float) -> str:
    return shown(metric, value) + (" %" if metric == "exact" else "")


def _known(results: Sequence[Result], field: str) -> list[float]:
    return [value for result in results if (value := number(result, field)) is not None]


def _range_of(results: Sequence[Result], field: str) -> str | None:
    """The range of a field, such as 800, or 61 to 62; None if no result has it."""
    values = _known(results, field)
    if not values:
        return None
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _listed(words: Sequence[str]) -> str:
    """The words as a list: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
