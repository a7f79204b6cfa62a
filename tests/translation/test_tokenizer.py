"""The tokenizer: text comes back, marks typed in a text stay text, and nothing is unknown."""

import json
import random
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from relpos.translation.errors import InputError
from relpos.translation.recipe import check_recipe
from relpos.translation.setting_ranges import SMALLEST_VOCABULARY
from relpos.translation.text import normal
from relpos.translation.tokenizer import load_tokenizer, train_tokenizer

VOCABULARY = 320
TYPED = ["<pad>", "<s>", "</s>", "<unk>"]
MARKS = [mark + "\u2060" for mark in TYPED]


def corpus() -> list[str]:
    words = ["the", "a", "house", "mouse", "green", "is", "das", "ein", "Haus", "Maus", "grün", "ist", "über"]
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=6)) + f" {i}, (ok)!" for i in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(corpus(), VOCABULARY)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def there_and_back(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30)
typical = st.text("ab usHM ü9,.<>/sé0x日😀", max_size=30)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(text=st.one_of(texts, typical))
@example("")
@example("the house")
@example("two  spaces  inside, and at the end  ")
@example("e\u0301 is \u00e9")
@example("\u4e2d\u6587 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467")
@example("<s> the </s> <pad> <unk> <0x41>")
@example(" a")
@example("\u200b\u00adthe\u2060 \u3000 house\ufeff\n")
@example("\u200b \u200d \u0000")
@example("x" * 1000)
def test_normal_text_comes_back(tokenizer, text) -> None:
    assert there_and_back(tokenizer, text) == normal(text)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(text=st.one_of(texts, typical))
def test_nothing_is_unknown_and_no_mark_but_the_last_comes_from_text(tokenizer, text) -> None:
    ids = tokenizer(text).input_ids
    marks = set(tokenizer.convert_tokens_to_ids(MARKS))
    assert ids[-1] == tokenizer.eos_token_id
    assert not marks & set(ids[:-1])


def test_words_keep_the_space_before_them_and_its_sign_comes_back_as_a_space(tokenizer) -> None:
    assert tokenizer.tokenize("the the")[0] == tokenizer.tokenize("the the")[1] == "▁the"
    assert there_and_back(tokenizer, "the▁house") == "the house"


def test_a_character_that_was_not_learned_becomes_its_bytes(tokenizer) -> None:
    for character in ("日", "ж", "😀"):
        found = tokenizer.tokenize(f"the {character}")
        assert found[-len(character.encode()) :] == [f"<0x{byte:02X}>" for byte in character.encode()]


@pytest.mark.parametrize("mark", [*TYPED, "<0x41>"])
def test_a_mark_typed_in_a_text_is_text(tokenizer, saved, mark) -> None:
    for used in (tokenizer, load_tokenizer(saved), AutoTokenizer.from_pretrained(saved)):
        for text in (mark, f"the {mark} house", f"the{mark}"):
            ids = used(text).input_ids
            assert not {*used.all_special_ids, used.get_vocab().get(mark)} & set(ids[:-1])
            assert used.decode(ids, skip_special_tokens=True) == text
            assert used([text, text]).input_ids == [ids, ids]


@pytest.mark.parametrize("load", [load_tokenizer, AutoTokenizer.from_pretrained])
def test_tokens_that_a_user_adds_stay_whole_and_typed_marks_stay_text(saved, tmp_path, load) -> None:
    changed = load(saved)
    assert changed.add_tokens(["<name>"]) == 1
    assert changed.add_special_tokens({"additional_special_tokens": ["<2de>"]}) == 1
    changed.save_pretrained(tmp_path)
    for used in (changed, load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        ids = used("<2de> the <name> is </s><pad> green<2de>").input_ids
        assert [i for i in ids if i >= VOCABULARY] == used.convert_tokens_to_ids(["<2de>", "<name>", "<2de>"])
        assert used.decode(ids, skip_special_tokens=True) == "the <name> is </s><pad> green"
        assert used("<s>").input_ids == load(saved)("<s>").input_ids


@pytest.mark.parametrize("load", [load_tokenizer, AutoTokenizer.from_pretrained])
def test_what_normalising_takes_away_changes_no_subword_under_plain_transformers(saved, load) -> None:
    used = load(saved)
    plain = used("the gr\u00fcne house").input_ids
    for text in (
        "the gru\u0308ne house ",
        "\ufeff the\tgr\u00fc\u00adne \u3000house\r\n",
        "the\u00a0gr\u00fcne house",
    ):
        assert used(text).input_ids == plain
        assert used([text, "is"]).input_ids[0] == plain
    for text in ("", " ", "\u200b", "\ufeff", "\u00ad", "\u2060", "\x00", "\u200d \ufe0f"):
        assert used(text).input_ids == [used.eos_token_id]


def test_a_word_of_any_length_is_learned_and_encoded_in_pieces(tokenizer) -> None:
    # learning a word takes the square of its length: 100,000 letters took 6 seconds in one piece
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a" * 1_000_000 + " b")
    pieces = [piece for piece, _ in cut]
    assert max(map(len, pieces)) == 256
    assert "".join(pieces) == "▁" + "a" * 1_000_000 + "▁b"
    learned = train_tokenizer([*corpus(), "ab" * 500_000], VOCABULARY)
    assert there_and_back(learned, "ab" * 500_000) == "ab" * 500_000


def test_words_of_an_ordinary_length_are_not_cut(tokenizer) -> None:
    for text in ("Donaudampfschifffahrtsgesellschaftskapit\u00e4n", "x" * 255):
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in pieces] == ["▁" + text]


def test_digits_and_punctuation_stand_alone(tokenizer) -> None:
    text = "the house, (2026)! a.b"
    spelled = [
        chr(int(token[3:5], 16)) if token.startswith("<0x") else token.removeprefix("▁")
        for token in tokenizer.tokenize(text)
    ]
    assert "".join(spelled) == text.replace(" ", "")
    for character in "2026(),.!":
        assert character in spelled


def test_no_learned_subword_joins_a_digit_or_punctuation_to_anything(tokenizer) -> None:
    for token in tokenizer.get_vocab():
        if token in MARKS or token.startswith("<0x"):
            continue
        joined = [x for x in token.removeprefix("▁") if x.isdigit() or unicodedata.category(x)[0] in "PS"]
        assert not joined or len(token) == 1, token


def test_the_vocabulary_has_the_size_asked_for_with_marks_first_and_all_bytes(tokenizer) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == MARKS
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY))
    assert all(f"<0x{byte:02X}>" in tokenizer.get_vocab() for byte in range(256))


def test_auto_tokenizer_and_load_tokenizer_give_the_same(tokenizer, saved) -> None:
    for other in (AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert (other.pad_token_id, other.bos_token_id, other.eos_token_id) == (0, 1, 2)
        assert other.padding_side == "right"
        assert other.model_input_names == ["input_ids", "attention_mask"]
        for text in ["", "  the  house ", "12, (3)!", "日本", "e\u0301", "</s>"]:
            ids = tokenizer(text).input_ids
            assert other(text).input_ids == ids
            assert other.decode(ids) == tokenizer.decode(ids)


def test_training_is_deterministic(tokenizer) -> None:
    true = json.loads(tokenizer.backend_tokenizer.to_str())
    for texts in (iter(corpus()), corpus(), tuple(corpus())):  # with many equally frequent characters
        again = train_tokenizer(texts, VOCABULARY)
        assert json.loads(again.backend_tokenizer.to_str()) == true
    # the order of the texts does not matter
    assert train_tokenizer(reversed(corpus()), VOCABULARY).get_vocab() == tokenizer.get_vocab()


def test_a_number_that_a_recipe_would_not_take_is_not_named() -> None:
    with pytest.raises(InputError) as caught:
        train_tokenizer(["a house", "ein Haus"], 301)
    told = str(caught.value)
    assert "the recipe asks for 301 (a recipe needs at least 301); give more text." in told
    assert "or less" not in told
    assert check_recipe({"data": {"train": [{"tsv": "a"}]}, "tokenizer": {"vocabulary": 301}}, "it")


def test_a_corpus_too_small_is_refused_and_the_number_it_names_works() -> None:
    told = r"it yields (\d+) subwords, the recipe asks for 5000; set tokenizer\.vocabulary to \1 or less"
    with pytest.raises(InputError, match=told) as caught:
        train_tokenizer(corpus(), 5000)
    named = int(str(caught.value).split("yields ")[1].split()[0])
    assert len(train_tokenizer(corpus(), named)) == named >= SMALLEST_VOCABULARY


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 1}'])
def test_a_damaged_tokenizer_is_refused_in_one_sentence(saved, tmp_path, content) -> None:
    shutil.copy(saved / "tokenizer_config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    told = r"the tokenizer cannot be read \(.+\)\.$|not a JSON object|the file tokenizer.json is missing"
    with pytest.raises(InputError, match=told) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
