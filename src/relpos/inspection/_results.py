"""Access to results of experiments, one dict for each variant of a task.

A missing, null or non-finite field reads as None; only `task` and `variant` have defaults.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
DASH = "\N{EN DASH}"

# name of a metric: label, factor, decimals
METRICS = {
    "bleu": ("BLEU", 1.0, 1),
    "bleu_lowercased": ("BLEU, lowercased", 1.0, 1),
    "chrf": ("chrF", 1.0, 1),
    "exact": ("lines exactly right (%)", 100.0, 1),
    "eval_bleu": ("validation BLEU", 1.0, 1),
    "eval_chrf": ("validation chrF", 1.0, 1),
    "eval_exact": ("lines exactly right in validation (%)", 100.0, 1),
    "eval_loss": ("validation loss (nats per token)", 1.0, 3),
}


def by_task(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each task; tasks and results keep their order."""
    tasks: dict[str, list[Result]] = {}
    for result in results:
        tasks.setdefault(str(result.get("task") or "task"), []).append(result)
    return tasks


def variant_names(results: Sequence[Result]) -> list[str]:
    """A name for each result of one task; repeated runs of a variant are numbered."""
    names: list[str] = []
    for result in results:
        name = str(result.get("variant") or "unnamed")
        count = sum(str(other.get("variant") or "unnamed") == name for other in results[: len(names)])
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def number(holder: Mapping[str, Any] | None, *path: str) -> float | None:
    """The number at a path such as ("scores", "bleu"), or None."""
    found: Any = holder
    for name in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return float(found)


def items(result: Result, name: str) -> list[Mapping[str, Any]]:
    """The dicts in a list, such as buckets, samples or history; empty if it is missing."""
    found = result.get(name)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, (list, tuple)) else []


def shown(metric: str, value: float | None) -> str:
    """A score as text: 31.2, or 85.0 for an exact share of 0.85, or a dash."""
    if value is None:
        return DASH
    _, factor, decimals = METRICS[metric]
    return f"{value * factor:.{decimals}f}"


def main_metric(results: Sequence[Result]) -> str:
    """The main metric: the share of exact lines if a variant reaches 0.2, else BLEU.

    If no variant has that score, the first metric that one has.
    """
    best = max((number(result, "scores", "exact") or 0.0 for result in results), default=0.0)
    wanted = ["exact", "bleu"] if best >= 0.2 else ["bleu"]
    for metric in [*wanted, "chrf", "exact"]:
        if any(number(result, "scores", metric) is not None for result in results):
            return metric
    return "bleu"


def bucket_ranges(results: Sequence[Result]) -> list[tuple[int, int]]:
    """(shortest, longest) of all buckets of all variants, in ascending order."""
    ranges = set()
    for result in results:
        for bucket in items(result, "buckets"):
            shortest, longest = number(bucket, "shortest"), number(bucket, "longest")
            if shortest is not None and longest is not None:
                ranges.add((int(shortest), int(longest)))
    return sorted(ranges)


def bucket_at(result: Result, ends: tuple[int, int]) -> Mapping[str, Any] | None:
    """The bucket with these ends, or None."""
    for bucket in items(result, "buckets"):
        if (number(bucket, "shortest"), number(bucket, "longest")) == ends:
            return bucket
    return None


def range_name(ends: tuple[int, int]) -> str:
    """The lengths of a bucket as text: 3, or 6–10."""
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}{DASH}{ends[1]}"


def first_given(results: Sequence[Result], name: str) -> Any:
    """The field of the first result that has it, or None."""
    return next((result[name] for result in results if result.get(name) is not None), None)
