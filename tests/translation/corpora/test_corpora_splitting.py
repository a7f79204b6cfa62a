"""Splitting: nothing leaks, and nothing but the pairs and the seed decides."""

import random
from itertools import pairwise

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos.translation.corpora import split
from relpos.translation.corpora.near_duplicates import DisjointSets, join_near_duplicates
from relpos.translation.corpora.words import word_key
from relpos.translation.errors import InputError

SHARES = {"validation": 0.2, "test": 0.2}

# few words, so that near-duplicates are common
words = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=9).map(" ".join)
corpora = st.lists(st.tuples(words, words), min_size=1, max_size=40)


def _table(pairs):
    return datasets.Dataset.from_dict({"source": [a for a, _ in pairs], "target": [b for _, b in pairs]})


def _split(pairs, shares=SHARES, seed=0):
    parts = split(_table(pairs), shares, seed)
    return {name: list(zip(part["source"], part["target"], strict=True)) for name, part in parts.items()}


def _bigrams(text):
    found = word_key(text)
    return set(pairwise(found))


def _are_near(a, b):
    if word_key(a) == word_key(b):
        return True
    left, right = _bigrams(a), _bigrams(b)
    return bool(left | right) and len(left & right) / len(left | right) >= 0.6


def _distinct_pairs(count):
    """Pairs that share no words."""
    return [(f"{_letters(i)}x {_letters(i)}y", f"{_letters(i)}v {_letters(i)}w") for i in range(count)]


def _letters(number):
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


@settings(deadline=None, max_examples=60)
@given(corpora)
def test_near_duplicates_are_in_one_part(pairs):
    parts = _split(pairs)
    part_of = [(name, pair) for name, part in parts.items() for pair in part]
    for index, (name, pair) in enumerate(part_of):
        for other_name, other in part_of[index + 1 :]:
            if any(_are_near(a, b) for a, b in zip(pair, other, strict=True)):
                assert name == other_name


@settings(deadline=None, max_examples=60)
@given(st.lists(words, max_size=40))
def test_groups_are_exactly_the_closure_of_near_duplicates(texts):
    fast, slow = DisjointSets(len(texts)), DisjointSets(len(texts))
    join_near_duplicates(texts, fast, 0.6)
    for i, a in enumerate(texts):
        for j, b in enumerate(texts[:i]):
            if _are_near(a, b):
                slow.union(i, j)
    assert [fast.find(i) for i in range(len(texts))] == [slow.find(i) for i in range(len(texts))]


@settings(deadline=None, max_examples=30)
@given(corpora, st.randoms(use_true_random=False), st.integers(0, 3))
def test_the_order_of_rows_does_not_matter(pairs, shuffler, seed):
    shuffled = list(pairs)
    shuffler.shuffle(shuffled)
    before, after = _split(pairs, seed=seed), _split(shuffled, seed=seed)
    assert {name: sorted(part) for name, part in before.items()} == {
        name: sorted(part) for name, part in after.items()
    }


@settings(deadline=None, max_examples=30)
@given(corpora)
def test_every_pair_is_in_one_part_and_in_order(pairs):
    parts = _split(pairs)
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    for part in parts.values():
        rows = iter(pairs)
        assert all(pair in rows for pair in part)


def test_sizes_follow_the_shares():
    parts = _split(_distinct_pairs(5_000), {"validation": 0.1, "test": 0.02})
    assert 420 < len(parts["validation"]) < 580
    assert 60 < len(parts["test"]) < 140


def test_seeds_give_different_splits():
    pairs = _distinct_pairs(200)
    assert _split(pairs, seed=0) == _split(pairs, seed=0)
    assert _split(pairs, seed=0) != _split(pairs, seed=1)


def test_what_differs_in_numbers_signs_or_placeholders_alone_stays_together():
    variants = [f"Chapter {i}: %s{'!' * i}" for i in range(4)]
    pairs = _distinct_pairs(300) + [(variant, f"a b c d {i}") for i, variant in enumerate(variants)]
    for seed in range(8):
        parts = _split(pairs, seed=seed)
        assert sum(any(source.startswith("Chapter") for source, _ in part) for part in parts.values()) == 1


def test_either_side_is_enough_to_be_near():
    pairs = [(f"{_letters(i)}x {_letters(i)}y", f"Das ist gleich, {i}.") for i in range(3)] + _distinct_pairs(
        300
    )[3:]
    for seed in range(8):
        parts = _split(pairs, seed=seed)
        assert sum(any(target.startswith("Das") for _, target in part) for part in parts.values()) == 1


def test_a_large_group_goes_to_train():
    pairs = _distinct_pairs(100) + [(f"All the same {i}", "Alles gleich") for i in range(20)]
    for seed in range(8):
        parts = _split(pairs, seed=seed)
        assert sum(target == "Alles gleich" for _, target in parts["train"]) == 20


def test_word_pairs_in_common_are_found_in_a_larger_corpus():
    draw = random.Random(0)
    texts = [" ".join(_letters(draw.randrange(500)) for _ in range(10)) for _ in range(2_000)]
    # one word of ten replaced at the end: 8 of 10 word pairs are shared
    changed = [" ".join([*text.split()[:-1], "new"]) for text in texts]
    groups = DisjointSets(4_000)
    join_near_duplicates(texts + changed, groups, 0.6)
    assert all(groups.find(i) == groups.find(i + 2_000) for i in range(2_000))
    assert len({groups.find(i) for i in range(4_000)}) == 2_000


@pytest.mark.parametrize("shares", [{"test": 1.0}, {"a": 0.5, "b": 0.5}, {"test": -0.1}, {"train": 0.5}])
def test_shares_out_of_range_and_that_of_train_are_told(shares):
    with pytest.raises(InputError, match='"train" gets' if "train" in shares else "together under 1"):
        split(_table([("a", "b")]), shares)


def test_no_share_and_an_empty_table_give_empty_parts():
    assert _split([("a", "b")], {"test": 0.0}) == {"test": [], "train": [("a", "b")]}
    parts = split(_table([("a", "b")]).select([]), SHARES)
    assert {name: len(part) for name, part in parts.items()} == {"validation": 0, "test": 0, "train": 0}
