"""Numbers in words: right, reproducible, and never both trained on and held out."""

import sys

import pytest

from relpos.translation.corpora import NumberLines, Source, read_corpus
from relpos.translation.corpora.numbers import write_numbers
from relpos.translation.errors import InputError


def _lines(**keys):
    return list(write_numbers(NumberLines(**keys), "en", "de"))


def test_numbers_are_written_in_both_languages(tmp_path):
    spec = {"lines": 300, "shortest": 1, "longest": 3, "largest": 21}
    table = read_corpus(Source(numbers=spec), "en", "de", tmp_path / "cache")
    words = {}
    for row in table:
        source, target = row["source"].split("; "), row["target"].split("; ")
        assert len(source) == len(target) == row["items"]
        words.update(zip(source, target, strict=True))
    assert len(table) == 300
    assert len(words) == 22
    assert words["twenty-one"] == "einundzwanzig"
    assert words["zero"] == "null"


def test_each_count_of_numbers_is_equally_likely():
    counts = [items for _, _, items in _lines(lines=3_000, shortest=3, longest=6)]
    assert sorted(set(counts)) == [3, 4, 5, 6]
    assert all(650 < counts.count(items) < 850 for items in range(3, 7))


def test_equal_seeds_give_equal_lines_and_other_seeds_others():
    assert _lines(lines=20, seed=1) == _lines(lines=20, seed=1)
    assert _lines(lines=20, seed=1) != _lines(lines=20, seed=2)


def test_held_out_lines_are_never_trained_on_whatever_the_seeds():
    spec = {"longest": 2, "largest": 99}
    trained = {line for seed in range(3) for line in _lines(lines=2_000, seed=seed, **spec)}
    held_out = {line for seed in range(3) for line in _lines(lines=300, seed=seed, part="heldout", **spec)}
    assert not trained & held_out
    assert len(held_out) > 600


def test_no_line_comes_twice():
    lines = _lines(lines=2_000, longest=2, largest=99)
    assert len(set(lines)) == 2_000


def test_too_few_different_lines_are_told():
    with pytest.raises(
        InputError, match=r"only \d+ different lines were found for part train; got lines: 50"
    ):
        _lines(lines=50, longest=1, largest=9)


def test_a_regional_language_falls_back_to_its_base():
    spec = NumberLines(lines=5)
    assert list(write_numbers(spec, "en-AU", "de_AT")) == list(write_numbers(spec, "en", "de"))


def test_an_unknown_language_is_told(failure):
    message = failure("en", "xx", numbers={"lines": 2})
    assert message.startswith("numbers cannot be written in 'xx'; num2words knows am, ar, ")


def test_a_missing_package_is_told_with_its_extra(failure, monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    message = failure(numbers={"lines": 2})
    assert message == 'numbers need the package num2words; run `pip install "relpos[demo]"`.'
