"""Scores of translations: BLEU and chrF by sacrebleu with signatures, in total and by length."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
from sacrebleu.metrics import BLEU, CHRF

from relpos.translation.generation import Hypothesis, Search, Translator
from relpos.translation.text import normal


@dataclass(frozen=True)
class Scores:
    """Scores of translations with one reference each.

    `bleu`, `bleu_lowercased` and `chrf` are 0 to 100; `exact` is the share of hypotheses equal to their
    reference after normalisation, 0 to 1. The signatures document how sacrebleu computed each score.
    """

    segments: int
    bleu: float
    bleu_lowercased: float
    chrf: float
    exact: float
    signatures: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The scores as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Bucket:
    """Scores of the segments whose source has `shortest` to `longest` words (or items)."""

    shortest: int
    longest: int
    scores: Scores


@dataclass(frozen=True)
class Evaluation:
    """Scores of one test set, in total and by length, and the scored hypotheses.

    `length_unit` is the unit of lengths: words of the source, or numbers in a generated line. The hypotheses
    have no model scores.
    """

    scores: Scores
    buckets: list[Bucket]
    length_unit: str
    hypotheses: list[Hypothesis]

    def to_dict(self) -> dict[str, Any]:
        """The scores as a dict of plain values, without the hypotheses."""
        return {
            "scores": self.scores.to_dict(),
            "length_unit": self.length_unit,
            "buckets": [asdict(bucket) for bucket in self.buckets],
        }


def evaluate(
    translator: Translator,
    pairs: datasets.Dataset,
    search: Search | None = None,
    *,
    edges: Sequence[int] = (5, 10, 20, 40),
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Translate the sources of `pairs` and score the best hypotheses.

    Args:
        pairs: columns source and target; a column `items` replaces the number of words as the length.
        edges: upper lengths of the buckets, rising; a last bucket has all longer segments.
        progress: called with the number of segments finished since its last call.
    """
    sources, references = pairs["source"][:], [normal(text) for text in pairs["target"][:]]
    translated = translator.translate(sources, search, with_scores=False, progress=progress)
    best = [found[0] for found in translated]
    hypotheses = [hypothesis.text for hypothesis in best]
    has_items = "items" in pairs.column_names
    lengths = pairs["items"][:] if has_items else [len(source.split()) for source in sources]
    return Evaluation(
        scores=score(hypotheses, references),
        buckets=score_by_length(lengths, hypotheses, references, edges),
        length_unit="numbers in the line" if has_items else "words in the source",
        hypotheses=best,
    )


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Score translations against references, tokenised as in WMT (13a).

    Raises:
        ValueError: the lists are empty or differ in length.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"hypotheses and references must have the same length > 0; got {len(hypotheses)} and "
            f"{len(references)}."
        )
    metrics = {
        "bleu": BLEU(tokenize="13a"),
        "bleu_lowercased": BLEU(tokenize="13a", lowercase=True),
        "chrf": CHRF(),
    }
    values, signatures = {}, {}
    for name, metric in metrics.items():
        values[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signatures[name] = metric.get_signature().format(short=False)
    pairs = zip(hypotheses, references, strict=True)
    exact = sum(normal(hypothesis) == normal(reference) for hypothesis, reference in pairs) / len(references)
    return Scores(len(references), exact=exact, signatures=signatures, **values)


def score_by_length(
    lengths: Sequence[int], hypotheses: Sequence[str], references: Sequence[str], edges: Sequence[int]
) -> list[Bucket]:
    """Scores of the segments in each bucket of lengths, without empty buckets.

    Args:
        lengths: of each source, in words or items.
        edges: upper lengths of the buckets, rising; a last bucket has all longer segments.
    Raises:
        ValueError: lengths, hypotheses and references differ in number.
    """
    if not len(lengths) == len(hypotheses) == len(references):
        raise ValueError(
            f"lengths, hypotheses and references must have the same length; got {len(lengths)}, "
            f"{len(hypotheses)} and {len(references)}."
        )
    buckets = []
    lower = -1  # an empty source has length 0
    for upper in [*edges, max([*lengths, *edges, 0]) + 1]:
        rows = [row for row, length in enumerate(lengths) if lower < length <= upper]
        if rows:
            scores = score([hypotheses[row] for row in rows], [references[row] for row in rows])
            present = [lengths[row] for row in rows]
            buckets.append(Bucket(min(present), max(present), scores))
        lower = upper
    return buckets
