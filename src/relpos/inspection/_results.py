"""Results of experiments as they come, one dict for each variant of a task, read without surprises.

A field that is missing, null or not finite reads as None; only `task` and `variant` have stand-ins.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
DASH = "\N{EN DASH}"

# name of a metric: how people call it, the factor to show it with, decimals
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
    """The results of each task, both in the order in which they came."""
    tasks: dict[str, list[Result]] = {}
    for result in results:
        tasks.setdefault(str(result.get("task") or "task"), []).append(result)
    return tasks


def variant_names(results: Sequence[Result]) -> list[str]:
    """A name for each result of one task; runs of one variant are numbered."""
    names: list[str] = []
    for result in results:
        name = str(result.get("variant") or "unnamed")
        count = sum(str(other.get("variant") or "unnamed") == name for other in results[: len(names)])
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def number(holder: Mapping[str, Any] | None, *path: str) -> float | None:
    """The number at the path, such as ("scores", "bleu"), or None."""
    found: Any = holder
    for name in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return float(found)


def items(result: Result, name: str) -> list[Mapping[str, Any]]:
    """The dicts in a list that may be missing: buckets, samples, history."""
    found = result.get(name)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, (list, tuple)) else []


def shown(metric: str, value: float | None) -> str:
    """A score as it is printed: 31.2, or 85.0 for an exact share of 0.85, or a dash."""
    if value is None:
        return DASH
    _, factor, decimals = METRICS[metric]
    return f"{value * factor:.{decimals}f}"


def main_metric(results: Sequence[Result]) -> str:
    """What the outcome is told by: the exact share if a variant gets a fifth of the lines right, else BLEU.

    Where no variant has that score, the first metric that one has.
    """
    best = max((number(result, "scores", "exact") or 0.0 for result in results), default=0.0)
    wanted = ["exact", "bleu"] if best >= 0.2 else ["bleu"]
    for metric in [*wanted, "chrf", "exact"]:
        if any(number(result, "scores", metric) is not None for result in results):
            return metric
    return "bleu"


def bucket_ranges(results: Sequence[Result]) -> list[tuple[int, int]]:
    """(shortest, longest) of every bucket of any variant, rising."""
    ranges = set()
    for result in results:
        for bucket in items(result, "buckets"):
            shortest, longest = number(bucket, "shortest"), number(bucket, "longest")
            if shortest is not None and longest is not None:
                ranges.add((int(shortest), int(longest)))
    return sorted(ranges)


def bucket_at(result: Result, ends: tuple[int, int]) -> Mapping[str, Any] | None:
    """The bucket of a result with these ends."""
    for bucket in items(result, "buckets"):
        if (number(bucket, "shortest"), number(bucket, "longest")) == ends:
            return bucket
    return None


def range_name(ends: tuple[int, int]) -> str:
    """3, or 6–10."""
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}{DASH}{ends[1]}"


def first_given(results: Sequence[Result], name: str) -> Any:
    """The first of the results that has the field, None without one."""
    return next((result[name] for result in results if result.get(name) is not None), None)
