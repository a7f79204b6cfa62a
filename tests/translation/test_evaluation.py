"""Scores: perfect ones are perfect, signatures say how they were made, and buckets share the segments out."""

import inspect
import itertools
import random
from collections.abc import Callable, Sequence

import datasets
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos.cli import evaluate as evaluate_command
from relpos.translation.evaluation import evaluate, score, score_by_length
from relpos.translation.experiments import Task
from relpos.translation.generation import Hypothesis, Search

REFERENCES = ["The green house is old .", "A cat sat on the red mat .", "Two dogs ran far away today ."]


class Echo:
    """Stands for a translator: says what it was given, changed by a function."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self.change = change
        self.searches: list[Search | None] = []

    def translate(
        self,
        texts: Sequence[str],
        search: Search | None = None,
        *,
        with_scores: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[Hypothesis]]:
        # a score is a pass of the model that nobody would read
        assert not with_scores
        self.searches.append(search)
        if progress:
            progress(len(texts))
        return [[Hypothesis(self.change(text), -1.0), Hypothesis("second best", -2.0)] for text in texts]


def test_identical_translations_score_as_high_as_can_be() -> None:
    found = score(REFERENCES, REFERENCES)
    assert found.bleu == pytest.approx(100)
    assert found.bleu_lowercased == pytest.approx(100)
    assert found.chrf == pytest.approx(100)
    assert found.exact == 1
    assert found.segments == 3


def test_translations_with_nothing_in_common_score_nothing() -> None:
    found = score(["zzz qqq xxx vvv jjj"] * 3, ["abc def", "abd", "efc"])
    assert found.bleu == found.chrf == found.exact == 0


def test_empty_hypotheses_are_scored_as_nothing() -> None:
    found = score(["", "", ""], REFERENCES)
    assert found.bleu == found.chrf == found.exact == 0


def test_signatures_name_tokenisation_case_and_version() -> None:
    signatures = score(REFERENCES, REFERENCES).signatures
    assert set(signatures) == {"bleu", "bleu_lowercased", "chrf"}
    for signature in signatures.values():
        assert f"version:{sacrebleu.__version__}" in signature
        assert "nrefs:1" in signature
    assert "tok:13a" in signatures["bleu"]
    assert "case:mixed" in signatures["bleu"]
    assert "case:lc" in signatures["bleu_lowercased"]
    assert "nc:6" in signatures["chrf"]


def test_only_the_lowercased_score_forgives_case() -> None:
    found = score([reference.upper() for reference in REFERENCES], REFERENCES)
    assert found.bleu_lowercased == pytest.approx(100)
    assert found.bleu < 50
    assert found.exact == 0


def test_scores_are_sacrebleus_of_the_whole_corpus() -> None:
    hypotheses = ["The green house was old .", "A cat sat on a mat .", "Two dogs ran away ."]
    found = score(hypotheses, REFERENCES)
    assert found.bleu == sacrebleu.corpus_bleu(hypotheses, [REFERENCES]).score
    assert found.chrf == sacrebleu.corpus_chrf(hypotheses, [REFERENCES]).score
    assert 0 < found.bleu < 100


def test_exact_is_a_share_and_white_space_at_the_ends_does_not_count() -> None:
    assert score(["a b", " c ", "x", "y"], ["a b", "c", "z", "z"]).exact == 0.5


@pytest.mark.parametrize(
    ("hypotheses", "references"), [(["a"], []), ([], []), (["a", "b"], ["a"]), ([], ["a"])]
)
def test_unequally_many_or_none_are_refused(hypotheses, references) -> None:
    told = (
        f"^hypotheses and references must have the same length > 0; got {len(hypotheses)} and "
        rf"{len(references)}\.$"
    )
    with pytest.raises(ValueError, match=told):
        score(hypotheses, references)


def test_lengths_and_segments_must_be_equally_many() -> None:
    with pytest.raises(
        ValueError, match=r"^lengths, hypotheses and references must have the same length; got 2, 1 and 1\.$"
    ):
        score_by_length([1, 2], ["a"], ["a"], (5,))


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    edges=st.lists(st.integers(0, 40), unique=True, max_size=4).map(sorted),
)
def test_buckets_hold_every_segment_once_and_keep_to_their_edges(lengths, edges) -> None:
    texts = [f"segment {i}" for i in range(len(lengths))]
    buckets = score_by_length(lengths, texts, texts, edges)
    assert sum(bucket.scores.segments for bucket in buckets) == len(lengths)
    for bucket in buckets:
        inside = [x for x in lengths if bucket.shortest <= x <= bucket.longest]
        assert len(inside) == bucket.scores.segments
        assert (bucket.shortest, bucket.longest) == (min(inside), max(inside))
        assert not any(bucket.shortest <= edge < bucket.longest for edge in edges)
    assert all(a.longest < b.shortest for a, b in itertools.pairwise(buckets))


def test_a_bucket_is_scored_by_its_own_segments() -> None:
    right, wrong = REFERENCES[0], "zzz qqq xxx vvv www"
    short, long = score_by_length([3, 30, 4], [right, wrong, right], [right, right, right], (5, 10))
    assert (short.scores.segments, short.scores.bleu) == (2, pytest.approx(100))
    assert (long.scores.segments, long.scores.bleu) == (1, 0)
    assert (long.shortest, long.longest) == (30, 30)


def pairs(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"source": REFERENCES, "target": REFERENCES} | columns)


def test_evaluation_scores_the_best_hypotheses_in_order() -> None:
    counts: list[int] = []
    search = Search(beams=2)
    echo = Echo()
    found = evaluate(echo, pairs(), search, progress=counts.append)
    assert echo.searches == [search]
    assert found.scores == score(REFERENCES, REFERENCES)
    assert [hypothesis.text for hypothesis in found.hypotheses] == REFERENCES
    assert found.length_unit == "words in the source"
    assert [(x.shortest, x.longest, x.scores.segments) for x in found.buckets] == [(6, 8, 3)]
    assert sum(counts) == 3


def test_buckets_have_the_edges_of_the_command_and_of_experiments() -> None:
    default = list(inspect.signature(evaluate).parameters["edges"].default)
    assert default == Task(name="a", title="a", recipe="a").edges == [5, 10, 20, 40]
    option = inspect.signature(evaluate_command).parameters["lengths"].default
    assert option == ",".join(map(str, default))


def test_items_replace_words_as_the_length() -> None:
    found = evaluate(Echo(), pairs(items=[1, 7, 12]), edges=(5, 10))
    assert found.length_unit == "numbers in the line"
    assert [(x.shortest, x.longest) for x in found.buckets] == [(1, 1), (7, 7), (12, 12)]


def test_an_empty_source_is_in_a_bucket_too() -> None:
    found = evaluate(Echo(), pairs(source=["", *REFERENCES[1:]]))
    assert sum(bucket.scores.segments for bucket in found.buckets) == 3
    assert found.buckets[0].shortest == 0


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="length > 0; got 0 and 0"):
        evaluate(Echo(), datasets.Dataset.from_dict({"source": [], "target": []}))


def test_the_plain_form_holds_scores_and_buckets_and_no_hypotheses() -> None:
    plain = evaluate(Echo(), pairs()).to_dict()
    assert set(plain) == {"scores", "length_unit", "buckets"}
    assert plain["scores"]["signatures"]["bleu"]
    assert plain["buckets"][0]["scores"]["segments"] == 3


def test_the_order_of_segments_does_not_matter() -> None:
    hypotheses = ["The green house was old .", "A cat sat on a mat .", "Two dogs ran away ."]
    order = list(range(3))
    random.Random(1).shuffle(order)
    moved = score([hypotheses[i] for i in order], [REFERENCES[i] for i in order])
    assert moved == score(hypotheses, REFERENCES)
