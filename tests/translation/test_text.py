"""Normalising: what is taken away, what stays, and that every way in does the same."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relpos.translation.errors import InputError
from relpos.translation.text import NORMALIZER, normal

SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace()]
INVISIBLE = ["\u200b", "\ufeff", "\u00ad", "\u2060", "\x00", "\x08", "\x7f", "\x9f", "\ufdd0", "\U0010ffff"]

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
typical = st.text("ab e\u0301\u00e9\u200b\u00ad\u200d\t\u3000\u2060.", max_size=12)


@pytest.mark.parametrize("space", SPACES)
def test_white_space_becomes_one_space_and_none_at_the_ends(space) -> None:
    assert normal(f"{space}a{space}{space}b {space}") == "a b"


@pytest.mark.parametrize("sign", INVISIBLE)
def test_signs_that_mean_nothing_are_taken_out(sign) -> None:
    assert normal(f"a{sign}b {sign} c{sign}") == "ab c"
    assert normal(f"{sign} {sign}") == ""
    assert normal(f"e{sign}\u0301") == "\u00e9"


def test_signs_that_change_how_a_text_reads_stay() -> None:
    for text in (
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f468\u200d\U0001f469",
        "\u2764\ufe0f",
        "a\u200fb",
    ):
        assert normal(text) == text


@pytest.mark.parametrize("sign", ["\u200d", "\u200c", "\u200e", "\ufe0f", "\u034f", "\u2063", "\u3164"])
def test_a_text_in_which_nothing_is_seen_becomes_empty(sign) -> None:
    assert normal(f" {sign}{sign} \u200b{sign}") == ""


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(text=st.one_of(any_text, typical))
@example("\u0958")  # form C has two characters for it
@example("\u2000\u037e")
@example("a\u0338\u200b\u0338")
@example("\u1e9b\u0323")
def test_normalising_twice_is_normalising_once_and_every_way_gives_the_same(text) -> None:
    once = normal(text)
    # a shortcut leaves most texts alone, and must not be seen
    assert once == NORMALIZER.normalize_str(text)
    assert normal(once) == once == NORMALIZER.normalize_str(once)
    assert once == " ".join(once.split()) == unicodedata.normalize("NFC", once)


def test_half_of_a_surrogate_pair_is_told_by_place() -> None:
    with pytest.raises(InputError, match=r"^line 3 has half of a surrogate pair, U\+D800, as character 3; "):
        normal("ab\ud800", "line 3")
    with pytest.raises(ValueError, match="surrogate"):
        normal("\udfff")


@pytest.mark.parametrize("text", [None, b"a", 3, ["a"]])
def test_what_is_no_text_is_refused(text) -> None:
    with pytest.raises(TypeError, match=f"^the text must be a str; got {type(text).__name__}"):
        normal(text)
