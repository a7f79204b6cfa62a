"""The report: results, figures and captions in one HTML file, without network access or JavaScript."""

import base64
import io
import os
import uuid
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from relpos.inspection._captions import Picture
from relpos.inspection._comparison import plot_by_length, plot_learning
from relpos.inspection._optional_dependencies import Environment, Figure, StrictUndefined, rc_context
from relpos.inspection._results import (
    DASH,
    METRICS,
    Result,
    bucket_at,
    bucket_ranges,
    by_task,
    first_given,
    items,
    main_metric,
    number,
    range_name,
    shown,
    variant_names,
)
from relpos.inspection._summary import LEVEL_POINTS, outcome_sentences, training_sentence

_MOST_SAMPLES = 8


def write_report(
    path: str | os.PathLike[str],
    results: Sequence[Result],
    *,
    title: str = "What relative positions do",
    pictures: Sequence[Picture] = (),
) -> Path:
    """Write results and pictures as one self-contained HTML file; an existing file is replaced atomically.

    Args:
        path: path of the file; its folder is created if missing.
        results: a dict for each variant of each task: task, title, variant, weights, updates, seconds,
            target_tokens_per_second, length_unit, trained_up_to, scores, buckets, samples, history. They are
            grouped by `task` and `variant`; a missing field is omitted or shown as a dash.
        title: title of the page.
        pictures: figures after the tasks, each with its caption.
    Returns:
        The path.
    Raises:
        OSError: the file cannot be written.
    """
    template = files("relpos.inspection").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template).render(
        title=title,
        tasks=[_task(name, group) for name, group in by_task(results).items()],
        pictures=[
            {"title": picture.title, "guide": picture.guide, "image": _image(picture.figure)}
            for picture in pictures
        ],
        signatures=_signatures(results),
        level_points=LEVEL_POINTS,
    )
    return _replace(Path(path), page)


def _task(name: str, results: list[Result]) -> dict[str, Any]:
    """The template's values for one task, as text."""
    metric, names = main_metric(results), variant_names(results)
    has_buckets = bool(bucket_ranges(results))
    has_history = any(items(result, "history") for result in results)
    return {
        "title": str(first_given(results, "title") or name),
        "training": training_sentence(results),
        "outcome": outcome_sentences(results),
        "variants": names,
        "comparison": _comparison(results),
        "metric": METRICS[metric][0],
        "length_unit": str(first_given(results, "length_unit") or "length"),
        "by_length": _by_length(results, metric),
        "by_length_image": _image(plot_by_length(results, metric)) if has_buckets else None,
        "samples": _samples(results),
        "learning_image": _image(plot_learning(results)) if has_history else None,
    }


def _comparison(results: list[Result]) -> dict[str, Any]:
    """The columns with at least one number, and a row for each variant; the best scores are marked."""
    columns: list[tuple[str, list[str], list[bool]]] = []
    for metric in ("bleu", "bleu_lowercased", "chrf", "exact"):
        values = [number(result, "scores", metric) for result in results]
        known = [value for value in values if value is not None]
        if known:
            texts = [shown(metric, value) for value in values]
            best = shown(metric, max(known))
            columns.append(
                (METRICS[metric][0], texts, [text == best and len(set(texts)) > 1 for text in texts])
            )
    for field, words in (
        ("weights", "weights"),
        ("updates", "updates"),
        ("seconds", "seconds"),
        ("target_tokens_per_second", "target tokens per second"),
    ):
        values = [number(result, field) for result in results]
        if any(value is not None for value in values):
            texts = [DASH if value is None else f"{value:,.0f}" for value in values]
            columns.append((words, texts, [False] * len(texts)))
    rows = [
        {"name": name, "cells": [{"text": texts[i], "is_best": best[i]} for _, texts, best in columns]}
        for i, name in enumerate(variant_names(results))
    ]
    return {"columns": [name for name, _, _ in columns], "rows": rows}


def _by_length(results: list[Result], metric: str) -> list[dict[str, Any]]:
    """A row for each bucket: lengths, number of segments, whether longer than trained, scores."""
    limit = number({"limit": first_given(results, "trained_up_to")}, "limit")
    rows = []
    for ends in bucket_ranges(results):
        buckets = [bucket_at(result, ends) for result in results]
        segments = [
            count for bucket in buckets if (count := number(bucket, "scores", "segments")) is not None
        ]
        rows.append(
            {
                "range": range_name(ends),
                "segments": f"{max(segments):,.0f}" if segments else DASH,
                "is_beyond": limit is not None and ends[0] > limit,
                "scores": [shown(metric, number(bucket, "scores", metric)) for bucket in buckets],
            }
        )
    return rows


def _samples(results: list[Result]) -> list[dict[str, Any]]:
    """Source and reference, with the hypotheses of all variants."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for index, result in enumerate(results):
        for sample in items(result, "samples"):
            pair = (_text(sample.get("source")), _text(sample.get("reference")))
            found.setdefault(pair, {})[index] = _text(sample.get("hypothesis"))
    return [
        {
            "source": source,
            "reference": reference,
            "hypotheses": [
                {
                    "name": name,
                    "text": hypotheses.get(index),
                    "is_exact": bool(reference) and hypotheses.get(index, "").strip() == reference.strip(),
                }
                for index, name in enumerate(variant_names(results))
            ],
        }
        for (source, reference), hypotheses in list(found.items())[:_MOST_SAMPLES]
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _signatures(results: Sequence[Result]) -> list[tuple[str, str]]:
    """(metric, signature) of each distinct signature, in order of appearance."""
    found: dict[tuple[str, str], None] = {}
    for result in results:
        scores = result.get("scores")
        signatures = scores.get("signatures") if isinstance(scores, dict) else None
        for metric, signature in (signatures or {}).items():
            found[METRICS.get(metric, (metric,))[0], str(signature)] = None
    return list(found)


def _image(figure: Figure) -> str:
    """The figure as a data URL; equal figures give equal text."""
    stream = io.BytesIO()
    with rc_context({"svg.hashsalt": "relpos", "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _replace(path: Path, text: str) -> Path:
    """Replace the file atomically; on failure the old one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = Path(os.path.realpath(path))
    part = place.with_name(f".{place.name[:50]}.relpos-{uuid.uuid4().hex[:8]}")
    with part.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.close()
            part.replace(place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return path
