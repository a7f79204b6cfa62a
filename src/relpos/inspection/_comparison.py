"""Plots that compare the variants of one task: scores by length, and learning curves."""

import math
from collections.abc import Sequence
from typing import Any

from relpos.inspection._optional_dependencies import Axes, Figure, FuncFormatter, MaxNLocator
from relpos.inspection._results import (
    METRICS,
    Result,
    bucket_at,
    bucket_ranges,
    first_given,
    items,
    main_metric,
    number,
    range_name,
    variant_names,
)
from relpos.inspection._style import INK, SHADE, limits, new_figure, say, tidy, title, variant_style

_CURVES = {"bleu": "eval_bleu", "chrf": "eval_chrf", "exact": "eval_exact"}


def plot_by_length(results: Sequence[Result], metric: str = "exact") -> Figure:
    """Plot the metric of each variant in each length bucket; trained lengths are shaded.

    Args:
        results: the results of one task. Buckets are evenly spaced.
        metric: "exact" (with 95 % Wilson intervals), "bleu", "bleu_lowercased" or "chrf".
    Raises:
        ValueError: no such metric.
    """
    _check_metric(metric)
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    ranges = bucket_ranges(results)
    if not ranges:
        say(axes, "no scores by length")
        return figure
    for index, (name, result) in enumerate(zip(variant_names(results), results, strict=True)):
        # shifted, so that equal scores do not hide each other
        offset = 0.05 * (index - (len(results) - 1) / 2)
        _draw_variant(axes, result, ranges, metric, name, index, offset)
    tidy(axes)
    axes.set_xlim(-0.5, len(ranges) - 0.5)
    top = 100.0 if metric == "exact" else max(axes.get_ylim()[1], 1.0)
    # room above for the notes, below for markers at zero
    axes.set_ylim(-0.03 * top, 1.12 * top)
    if metric == "exact":
        axes.set_yticks(range(0, 101, 20))
    _shade_trained(axes, ranges, first_given(results, "trained_up_to"))
    axes.set_xticks(range(len(ranges)), [range_name(ends) for ends in ranges])
    axes.set_xlabel(str(first_given(results, "length_unit") or "length"), fontsize=11, color=INK)
    axes.set_ylabel(METRICS[metric][0], fontsize=11, color=INK)
    title(axes, f"{_start_upper(METRICS[metric][0])} for short and long input")
    axes.legend(fontsize=10, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def plot_learning(results: Sequence[Result], metric: str | None = None) -> Figure:
    """Plot the validation score of each variant against seconds and against updates.

    Args:
        results: the results of one task.
        metric: "eval_bleu", "eval_chrf", "eval_exact" or "eval_loss". Default: the main metric of the task,
            else the first that was recorded.
    Raises:
        ValueError: no such metric.
    """
    if metric is None:
        metric = _recorded_metric(results)
    _check_metric(metric)
    figure = new_figure(4.0)
    left, right = figure.subplots(1, 2, sharey=True)
    values: list[float] = []
    for axes, against in ((left, "seconds"), (right, "step")):
        for index, (name, result) in enumerate(zip(variant_names(results), results, strict=True)):
            points = _points(result, against, metric)
            style = variant_style(index)
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, label=name, linewidth=1.8, markersize=4, **style)
                values += ys
        tidy(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if not values:
        figure.clear()
        say(figure.add_subplot(), "no learning curve recorded")
        return figure
    low, high = limits(values)
    left.set_ylim(max(low, 0.0) if min(values) >= 0 else low, high)
    left.set_ylabel(METRICS[metric][0], fontsize=11, color=INK)
    left.set_xlabel("training time (seconds)", fontsize=11, color=INK)
    right.set_xlabel("updates", fontsize=11, color=INK)
    title(left, f"{_start_upper(METRICS[metric][0])} by time")
    title(right, "and by updates")
    handles, names = left.get_legend_handles_labels()
    if not handles:
        handles, names = right.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(len(names), 5), fontsize=10, frameon=False
    )
    return figure


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """The 95 % confidence interval of a share in `count` trials (Wilson 1927), within 0 and 1."""
    if count <= 0:
        return 0.0, 1.0
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}; got {metric!r}.")


def _recorded_metric(results: Sequence[Result]) -> str:
    wanted = [
        _CURVES.get(main_metric(results), "eval_bleu"),
        "eval_bleu",
        "eval_chrf",
        "eval_exact",
        "eval_loss",
    ]
    for metric in wanted:
        if any(number(point, metric) is not None for result in results for point in items(result, "history")):
            return metric
    return "eval_loss"


def _draw_variant(
    axes: Axes,
    result: Result,
    ranges: list[tuple[int, int]],
    metric: str,
    name: str,
    index: int,
    offset: float,
) -> None:
    factor = METRICS[metric][1]
    places, values, lower, upper = [], [], [], []
    for place, ends in enumerate(ranges):
        bucket = bucket_at(result, ends)
        value = number(bucket, "scores", metric)
        if value is None:
            continue
        low, high = value, value
        segments = number(bucket, "scores", "segments")
        if metric == "exact" and segments is not None:
            low, high = wilson_interval(value, segments)
        places.append(place + offset)
        values.append(value * factor)
        lower.append((value - low) * factor)
        upper.append((high - value) * factor)
    style = variant_style(index)
    if metric == "exact":
        axes.errorbar(
            places, values, yerr=[lower, upper], label=name, linewidth=1.8, capsize=3, elinewidth=1, **style
        )
    else:
        axes.plot(places, values, label=name, linewidth=1.8, **style)


def _shade_trained(axes: Axes, ranges: list[tuple[int, int]], trained_up_to: object) -> None:
    if isinstance(trained_up_to, bool) or not isinstance(trained_up_to, (int, float)):
        return
    end = -0.5
    for place, (shortest, longest) in enumerate(ranges):
        inside = (min(longest, trained_up_to) - shortest + 1) / (longest - shortest + 1)
        if inside > 0:
            end = place - 0.5 + inside
    axes.axvspan(-0.5, end, color=SHADE, zorder=0)
    axes.axvline(end, color="#888888", linewidth=1, linestyle=":")
    if end > -0.5:
        _note(axes, end - 0.06, "trained on ◂", ha="right")
    if end < len(ranges) - 0.5:
        _note(axes, end + 0.06, "▸ never trained on", ha="left")


def _note(axes: Axes, x: float, text: str, *, ha: str) -> None:
    """Write a small text at the top, above the curves."""
    options: dict[str, Any] = {"ha": ha, "va": "top", "fontsize": 10, "color": "#555555"}
    axes.text(x, 0.985, text, transform=axes.get_xaxis_transform(), **options)


def _points(result: Result, against: str, metric: str) -> list[tuple[float, float]]:
    points = []
    for point in items(result, "history"):
        x, y = number(point, against), number(point, metric)
        if x is not None and y is not None:
            points.append((x, y * METRICS[metric][1]))
    return points


def _start_upper(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
