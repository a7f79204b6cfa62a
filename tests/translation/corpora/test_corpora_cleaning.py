"""Cleaning: which pairs go, for which reason, and that the rest stays as it is."""

import re

import pytest
from pydantic import ValidationError

from relpos.translation.corpora import CleaningReport, CleaningRules, Source, clean, read_corpus
from relpos.translation.corpora.placeholders import placeholders
from relpos.translation.corpora.timed_regex import REGEX_SECONDS, matches
from relpos.translation.corpora.words import word_key
from relpos.translation.errors import InputError


def _pairs(table):
    return list(zip(table["source"], table["target"], strict=True))


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("", "leer", "empty side"),
        ("empty", " \t", "empty side"),
        ("Server", "server", "equal sides"),
        ("12:30", "12.30 a", "too few letters"),
        ("%s", "%s a", "too few letters"),
        ("file %s", "Datei", "placeholders differ"),
        ("%s in %s", "%s in der Datei", "placeholders differ"),
        ("%(name)s died", "%(nam)s starb", "placeholders differ"),
        ("{a} and {b}", "{a} und {c}", "placeholders differ"),
        ("<b>bold</b>", "<b>fett", "placeholders differ"),
        ("here &amp; there", "hier und dort", "placeholders differ"),
        ("one two three four five six seven", "ein", "length ratio"),
        ("a", "eins zwei drei vier f\u00fcnf sechs sieben", "length ratio"),
        ("word " * 201, "Wort " * 150, "too long"),
    ],
)
def test_a_bad_pair_goes_for_its_first_reason(table, source, target, reason):
    kept, report = clean(table([("good pair", "gutes Paar"), (source, target)]))
    assert _pairs(kept) == [("good pair", "gutes Paar")]
    assert report == CleaningReport(kept=1, dropped={reason: 1})


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%(a)s of %(b)s", "%(b)s von %(a)s"),
        ('<a href="x">here</a>', '<a href="y">hier</a>'),
        ("100% sure", "100%ig sicher"),
        ("date of birth", "Geburtsdatum"),
        ("a < b and c > d", "c > d und a < b"),
        ("one; two; three", "\u4e00\uff1b\u4e8c\uff1b\u4e09"),
        ("The weather is very nice here today.", "\u4eca\u65e5\u306f\u3053\u3053\u3067\u3059"),
        ("water", "\u092a\u093e\u0928\u0940"),
    ],
)
def test_a_good_pair_stays(table, source, target):
    kept, report = clean(table([(source, target)]))
    assert _pairs(kept) == [(source, target)]
    assert report.dropped == {}


def test_texts_are_composed_and_have_single_spaces(table):
    kept, _ = clean(table([(" u\u0308ber\u00a0 all ", "above\n\nall")]))
    assert _pairs(kept) == [("\u00fcber all", "above all")]


def test_of_equal_pairs_the_first_stays_in_its_place(table):
    pairs = [("b", "x"), ("a", "y"), ("b", "z"), ("a", "y"), ("b ", "x"), ("c", "w")]
    kept, report = clean(table(pairs))
    assert _pairs(kept) == [("b", "x"), ("a", "y"), ("b", "z"), ("c", "w")]
    assert report.dropped == {"duplicate": 2}


def test_a_dropped_pair_makes_no_duplicate(table):
    kept, report = clean(table([("same", "same"), ("same", "same")]))
    assert len(kept) == 0
    assert report.dropped == {"equal sides": 2}


def test_each_rule_can_be_turned_off(table):
    pairs = [("same", "same"), ("same", "same"), ("file %s", "Datei"), ("1", "2"), ("a", "w " * 300)]
    off = dict.fromkeys(("drop_equal", "drop_duplicates", "match_placeholders"), False)
    rules = CleaningRules(**off, max_ratio=None, max_words=None, min_letters=0.0)
    kept, report = clean(table(pairs), rules)
    assert len(kept) == 5
    assert report == CleaningReport(kept=5)


def test_placeholders_can_be_limited_and_patterns_forbidden(table):
    pairs = [("%s is here", "%s ist da"), ("see x.org", "siehe x.org"), ("plain text", "reiner Text")]
    kept, report = clean(table(pairs), CleaningRules(max_placeholders=0, drop_matching=r"\w\.\w"))
    assert _pairs(kept) == [("plain text", "reiner Text")]
    assert report.dropped == {"matches drop_matching": 1, "too many placeholders": 1}
    with pytest.raises(ValidationError, match=r"'\(' is not a regular expression"):
        CleaningRules(drop_matching="(")


@pytest.mark.parametrize("pattern", [r"(a|aa)+$", r"^(a|b|ab)*c$", r"(x+x+)+y|(a|aa)+$"])
def test_a_pattern_that_would_search_for_years_is_named_with_its_text(table, pattern, monkeypatch):
    monkeypatch.setattr("relpos.translation.corpora.timed_regex.REGEX_SECONDS", 0.05)
    text = "ab" * 40 + "c" + "a" * 60 + "b"
    with pytest.raises(InputError) as caught:
        clean(table([("short a", "kurz b"), (text, "b")]), CleaningRules(drop_matching=pattern))
    told = f"data.cleaning.drop_matching: {pattern!r} takes more than 0.05 seconds on the text 'abab"
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


def test_every_text_has_seconds_for_its_pattern_and_no_more():
    assert REGEX_SECONDS == 2.0


# what `regex` would read otherwise: braces of its own, and what is told about sets
PATTERNS = [
    *(r"a{e}", r"{s}", r"%{i}", r"\{d}", r"[{e}]", r"a{2}", r"a{,2}b", r"a{1,}", r"x{}", r"x{,}", r"\\{e}"),
    *(r"\N{EN DASH}?a{s}", r"(?x) a # {e}", r"a{e<=1}", r"\bfoo\b", r"[^\w\s]", r"(?i)STRASSE"),
    *(r"^$", r"(?<=a)b", r"\d+"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_to_python(pattern):
    texts = [
        "a{e}",
        "{s}",
        "%{i}",
        "{d}",
        "e}",
        "aa",
        "ab",
        "a{s}",
        "x{}",
        "b",
        "\\{e}",
        "a",
        "ba{e<=1}",
        "foo",
    ]
    texts += ["x", "b!", "foobar", "7", "-a{s}", "ae", "\\e", "strasse"]
    for text in [*texts, "", "stra\u00dfe", "a b", "\u0663"]:
        assert matches(pattern, text, "key") is (re.search(pattern, text) is not None), text


NO_PATTERNS = ["(", "[a", "a**", "(?P<n>a)(?P<n>b)", r"\p{L}", "a{2,1}", "(?z)", "(" * 5000]
# what Python will read otherwise one day
AMBIGUOUS = ["[[:alpha:]]", "[a--b]", "[a&&b]", "[a||b]"]


@pytest.mark.parametrize("pattern", [*NO_PATTERNS, *AMBIGUOUS])
def test_what_is_no_pattern_is_told(pattern):
    told = "is ambiguous: Possible" if pattern in AMBIGUOUS else "is not a regular expression"
    with pytest.raises(ValidationError, match=told):
        CleaningRules(drop_matching=pattern)


def test_ends_of_sentences_can_be_made_to_match(table):
    pairs = [
        ("It is.", "Es ist"),
        ("Is it?", "Ist es."),
        ("names:", "Namen:"),
        ("a day.", "\u4e00\u5929\u3002"),
    ]
    kept, report = clean(table(pairs), CleaningRules(match_ends=True))
    assert _pairs(kept) == pairs[2:]
    assert report.dropped == {"ends differ": 2}
    assert len(clean(table(pairs))[0]) == 4


def test_other_columns_stay(tmp_path):
    numbers = read_corpus(Source(numbers={"lines": 20}), "en", "de", tmp_path)
    kept, report = clean(numbers)
    assert kept["items"][:] == numbers["items"][:]
    assert report.kept == 20


def test_the_result_lies_in_the_corpus_cache_and_is_reused(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("one\teins\ntwo\tzwei\n\tdrei\n")
    numbers = read_corpus(Source(tsv=path), "en", "de", tmp_path / "cache")
    first, again = clean(numbers)[0], clean(numbers)[0]
    files = [file["filename"] for file in first.cache_files]
    assert files == [file["filename"] for file in again.cache_files]
    assert all(file.startswith(str(tmp_path / "cache")) for file in files)
    assert clean(numbers, CleaningRules(max_words=1))[0].cache_files != first.cache_files


def test_an_empty_table_is_clean(table):
    kept, report = clean(table([("x", "")]).select([]))
    assert len(kept) == 0
    assert report == CleaningReport(kept=0)


def test_the_report_reads_well():
    report = CleaningReport(kept=1234, dropped={"duplicate": 2, "too long": 1000})
    assert report.lines() == ["1,234 of 2,236 pairs kept", "2 dropped: duplicate", "1,000 dropped: too long"]
    assert str(report).splitlines() == report.lines()


def test_placeholders_of_many_kinds_are_found():
    text = "%s %d %5.2f %(a)s %1$s %2 {b} {} {0:d} ${c} $d <b>x</b> <br/> &lt; &#39; 50% $5 100%ig A & B"
    found = ["%s", "%d", "%5.2f", "%(a)s", "%1$s", "%2", "{b}", "{}", "{0:d}", "${c}", "$d"]
    assert sorted(placeholders(text).elements()) == sorted([*found, "<b>", "</b>", "<br>", "&lt;", "&#39;"])


def test_a_word_key_has_words_alone():
    assert word_key("Chapter 12: \u201cThe End\u201d of %s") == ("chapter", "the", "end", "of")
    assert word_key("12") != word_key("13")
    assert word_key("\u4eca\u65e5") == ("\u4eca", "\u65e5")
