"""Translating text: order, batches, n-best, prefixes, sampling; the model has learned to copy."""

import copy
import json
import math
import random
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer

from relpos.translation import generation, preparation
from relpos.translation.batching import PairCollator
from relpos.translation.config import RelposConfig
from relpos.translation.corpora import Source, read_corpus
from relpos.translation.errors import InputError
from relpos.translation.evaluation import evaluate, score
from relpos.translation.generation import LongTextWarning, Search, Translator
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.sentence_splitting import split_text
from relpos.translation.text import normal
from relpos.translation.tokenizer import train_tokenizer

WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog"]


def sentences(count: int, longest: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="session")
def copier() -> Translator:
    """A translator that has learned for a few seconds to copy up to six words."""
    texts = sentences(400, 6, seed=1)
    tokenizer = train_tokenizer(texts, 290)
    torch.manual_seed(1)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "d_ff": 64}
    no_dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    config = RelposConfig(vocab_size=len(tokenizer), **sizes, **no_dropout, relative_max_distance=4)
    model = RelposForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ids = tokenizer(texts).input_ids
    collate = PairCollator(0)
    for step in range(200):
        rows = [ids[(step * 32 + i) % len(ids)] for i in range(32)]
        batch = collate([{"input_ids": row, "labels": row} for row in rows])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Translator(model.eval(), tokenizer)


def best(translator: Translator, texts: list[str], search: Search | None = None, **options) -> list[str]:
    return [found[0].text for found in translator.translate(texts, search, **options)]


TEXTS = ["", *sentences(12, 6, seed=5), "  \t ", "cat", "dog dog dog dog dog dog dog dog dog"]


def test_the_copier_copies(copier) -> None:
    held_out = sentences(40, 6, seed=9)
    copied = best(copier, held_out)
    assert sum(a == b for a, b in zip(copied, held_out, strict=True)) >= 20
    assert len(set(copied)) > 20


def test_hypotheses_come_in_the_order_of_the_texts(copier) -> None:
    search = Search(beams=2)
    alone = [best(copier, [text], search)[0] for text in TEXTS]
    assert best(copier, TEXTS, search) == alone
    assert best(copier, TEXTS[::-1], search) == alone[::-1]
    assert len(set(alone)) > 8


def test_lines_in_which_nothing_is_seen_give_one_empty_hypothesis(copier) -> None:
    invisible = ["\u200b", "\ufeff", "\u00ad", "\u2060", "\x00", "\u200b \u200d\ufe0f"]
    for lines in ([""], ["", " ", "\t", "\n", "\u3000", "\u00a0"], invisible):
        for search in (None, Search(beams=4, n_best=3), Search(sample=True)):
            for found in copier.translate(lines, search):
                assert [(hypothesis.text, hypothesis.score) for hypothesis in found] == [("", 0.0)]
    assert copier.translate([]) == []


def saved_before_normalising(translator: Translator) -> Translator:
    """The same with a tokenizer that composes characters and leaves all else as it is."""
    content = json.loads(translator.tokenizer.backend_tokenizer.to_str())
    content["normalizer"] = {"type": "NFC"}
    tokenizer = copy.copy(translator.tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return Translator(translator.model, tokenizer)


@pytest.mark.parametrize("change", [lambda translator: translator, saved_before_normalising])
def test_what_normalising_takes_away_changes_no_translation_and_no_score(copier, change) -> None:
    translator = change(copier)
    plain = [*sentences(6, 6, seed=5), "cat", "dog dog"]
    changed = [f"\ufeff {text.replace(' ', '  ')}\u00a0\u200b\r" for text in plain]
    search = Search(beams=2)
    assert translator.translate(changed, search) == copier.translate(plain, search)
    assert translator.translate(changed, search, prefix=" cat\t dog \n") == copier.translate(
        plain, search, prefix="cat dog"
    )
    assert translator.translate(plain, search, prefix=" \u200b") == copier.translate(plain, search)


def test_validation_evaluation_and_translation_read_a_line_alike(copier, tmp_path: Path) -> None:
    plain = sentences(8, 6, seed=5)
    changed = [f" {text.replace(' ', '  ')}\u00a0 " for text in plain]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{text}\t{text}\n" for text in changed), encoding="utf-8")
    pairs = read_corpus(Source(tsv=path), "en", "de", tmp_path / "cache")
    raw = datasets.Dataset.from_dict({"source": changed, "target": changed})
    search = Search(beams=1)
    true = best(copier, plain, search)
    exact = sum(a == b for a, b in zip(true, plain, strict=True)) / len(plain)
    assert exact > 0
    for found in (evaluate(copier, pairs, search), evaluate(copier, raw, search)):
        assert [hypothesis.text for hypothesis in found.hypotheses] == true
        assert found.scores.exact == exact
    # the trainer translates what its table holds, and scores it so
    assert best(copier, pairs["source"][:], search) == true
    assert score(true, pairs["target"][:]).exact == exact


def test_half_of_a_surrogate_pair_is_told_by_line_or_as_the_prefix(copier) -> None:
    for kind in (InputError, ValueError):
        with pytest.raises(kind, match=r"^line 2 has half of a surrogate pair, U\+D800, as character 1"):
            copier.translate(["cat", "\ud800"])
        with pytest.raises(kind, match=r"^the prefix has half of a surrogate pair, U\+DCFF"):
            copier.translate(["cat"], prefix="dog\udcff")
    with pytest.raises(InputError, match=r"^line 11 has half"):
        copier.translate(["\udfff"], first_line=11)


def test_one_text_in_the_place_of_a_list_is_refused(copier) -> None:
    with pytest.raises(TypeError, match="texts must be a list of str; got one str"):
        copier.translate("cat")
    with pytest.raises(TypeError, match="line 2 must be a str; got NoneType"):
        copier.translate(["cat", None])


def of_length(translator: Translator, trained_length: int) -> Translator:
    return Translator(translator.model, translator.tokenizer, trained_length=trained_length)


def test_lines_far_beyond_training_give_one_warning_from_where_translate_was_called(copier) -> None:
    short = of_length(copier, len(copier.tokenizer("cat dog red").input_ids))
    lines = ["cat", "dog " * 9, "cat dog red blue", "cat " * 12]
    with pytest.warns(LongTextWarning) as caught:
        found = short.translate(lines, Search(beams=1), first_line=5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    length = len(copier.tokenizer(lines[1]).input_ids)
    told = f"has {length} subwords, and this model was trained on at most {short.trained_length}:"
    assert str(caught[0].message).startswith(f"line 6 ('dog dog dog dog dog dog dog dog dog') {told}")
    assert found == copier.translate(lines, Search(beams=1))


def test_long_lines_are_split_on_demand_and_others_stay_as_they_were(copier) -> None:
    text, prefix = "cat dog red. blue, one two three. green dog", "cat"
    short = of_length(copier, 10)
    pieces = split_text(text, 10, copier.tokenizer)
    assert len(pieces) > 3
    lines = ["cat dog", text, "", "red"]
    for search in (Search(beams=1), Search(beams=3, n_best=2)):
        done: list[int] = []
        found = short.translate(lines, search, split_long=True, prefix=prefix, progress=done.append)
        assert sum(done) == len(lines)
        for line in (0, 2, 3):
            assert found[line] == copier.translate(lines, search, prefix=prefix)[line]
        parts = [*copier.translate(pieces[:1], search, prefix=prefix), *copier.translate(pieces[1:], search)]
        for rank, hypothesis in enumerate(found[1]):
            assert hypothesis.text == " ".join(part[rank].text for part in parts)
            assert hypothesis.score == pytest.approx(sum(part[rank].score for part in parts), abs=1e-3)


def test_a_line_that_would_take_for_ever_is_refused_unless_it_is_split(copier, monkeypatch) -> None:
    monkeypatch.setattr(generation, "MOST_SUBWORDS", 40)
    word = "a" * 2000
    with pytest.raises(InputError, match=r"^line 2 \('a{40} \.\.\.'\) has \d+ subwords, and at most 40 "):
        copier.translate(["cat", word])
    (found,) = of_length(copier, 30).translate([word], Search(beams=1), split_long=True)
    assert found[0].text
    with pytest.raises(InputError, match="at most 40 are translated at once"):
        evaluate(of_length(copier, 30), datasets.Dataset.from_dict({"source": [word], "target": ["a"]}))


def test_a_validation_pair_that_could_not_be_translated_is_told_before_training(
    small_recipe, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(preparation, "MOST_SUBWORDS", 3)
    with pytest.raises(InputError, match=r"^validation pair \d+ must have at most 3 subwords; got \d+"):
        preparation.prepare(small_recipe(), tmp_path, lambda line: None)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("I am. You are! Is it so? Yes.", ["I am.", "You are!", "Is it so?", "Yes."]),
        ('He said: "Stop." Then (at 3.5 p.m.) it', ['He said: "Stop."', "Then (at 3.5 p.m.) it"]),
        ("Dr. Smith met Mr. X. at a.b?c=d e.g. here... now.", None),
        ("\u6211\u6765\u4e86\u3002\u4f60\u597d\uff01", ["\u6211\u6765\u4e86\u3002", "\u4f60\u597d\uff01"]),
        ("\u0935\u0939\u0964 \u0939\u093e\u0901", ["\u0935\u0939\u0964", "\u0939\u093e\u0901"]),
        ("no end", None),
    ],
)
def test_a_text_is_cut_at_sentence_ends(copier, text, sentences) -> None:
    assert split_text(text, 10_000, copier.tokenizer) == (sentences or [text])


@pytest.mark.parametrize("longest", [5, 12, 40])
def test_pieces_are_short_enough_and_nothing_but_spaces_is_lost(copier, longest) -> None:
    draw = random.Random(longest)
    for _ in range(30):
        words = draw.choices([*WORDS, "A.", "a,", "\u3002", "\u6211", "x" * 30, "!", "\U0001f600"], k=40)
        text = normal(" ".join(words))
        pieces = split_text(text, longest, copier.tokenizer)
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
        assert all(pieces)
        for piece in pieces:
            assert len(copier.tokenizer(piece).input_ids) <= longest or len(piece) == 1


def test_what_is_too_long_is_cut_at_a_clause_or_else_between_words_or_else_inside_one(copier) -> None:
    length = len(copier.tokenizer("cat dog, red blue").input_ids)
    assert split_text("cat dog, red blue", length, copier.tokenizer) == ["cat dog,", "red blue"]
    assert split_text("cat dog red blue", length - 1, copier.tokenizer) == ["cat dog", "red blue"]
    assert "".join(split_text("x" * 40, 10, copier.tokenizer)) == "x" * 40


@pytest.mark.parametrize("place", ["model", "checkpoint-8"])
def test_the_trained_length_is_read_from_the_recipe_beside_a_model(copier, tmp_path: Path, place) -> None:
    folder = tmp_path / "checkpoints" / place if place != "model" else tmp_path / place
    copier.model.save_pretrained(folder)
    copier.tokenizer.save_pretrained(folder)
    (folder / "seal.json").write_text('{"format": 1, "files": {}}')
    assert Translator.load(folder).trained_length is None
    recipe = (folder if place == "model" else tmp_path) / "recipe.yaml"
    others = ("training: {max_length: many}", "training: 3", "a: [", "[" * 20_000, "\udcff")
    for text in ("training: {max_length: 77}", *others):
        recipe.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert Translator.load(folder).trained_length == (None if text in others else 77)


@pytest.mark.parametrize("search", [{"beams": 1}, {"beams": 4, "n_best": 3}])
def test_what_else_is_in_the_batch_does_not_matter(copier, search) -> None:
    found = [copier.translate(TEXTS, Search(**search, tokens_per_batch=budget)) for budget in (1, 64, 4096)]
    texts = [[[hypothesis.text for hypothesis in row] for row in rows] for rows in found]
    assert texts[0] == texts[1] == texts[2]
    for rows in zip(*found, strict=True):
        for hypotheses in zip(*rows, strict=True):
            scores = [hypothesis.score for hypothesis in hypotheses]
            assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
def test_scores_are_log_probabilities_over_length_to_the_penalty(copier, length_penalty) -> None:
    text = "red green blue"
    search = Search(beams=4, n_best=4, length_penalty=length_penalty)
    (found,) = copier.translate([text], search)
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    assert len({x.text for x in found}) > 1
    source = torch.tensor([copier.tokenizer(text).input_ids])
    for hypothesis in found:
        ids = copier.tokenizer(hypothesis.text).input_ids
        log_probability, seen = 0.0, [1]
        for token in ids:
            with torch.no_grad():
                logits = copier.model(source, decoder_input_ids=torch.tensor([seen])).logits[0, -1]
            log_probability += logits.double().log_softmax(-1)[token].item()
            seen.append(token)
        assert hypothesis.score == pytest.approx(log_probability / len(ids) ** length_penalty, abs=1e-4)


def test_a_prefix_begins_every_hypothesis_and_is_not_scored(copier) -> None:
    search = Search(beams=4, n_best=2)
    for found in copier.translate(["red green blue", "cat"], search, prefix="dog dog"):
        assert all(hypothesis.text.startswith("dog dog") for hypothesis in found)
    text = "red green blue"
    (plain,) = copier.translate([text], Search(beams=1, length_penalty=0.0))
    (forced,) = copier.translate([text], Search(beams=1, length_penalty=0.0), prefix="red green")
    assert forced[0].text == plain[0].text == text
    assert forced[0].score > plain[0].score  # fewer words are left to be wrong about


def test_a_prefix_after_training_gives_what_the_model_says_when_teacher_forced(copier) -> None:
    text, prefix = "cat dog red blue", "cat dog"
    (found,) = copier.translate([text], Search(beams=4), prefix=prefix)
    given = [1, *copier.tokenizer(prefix).input_ids[:-1]]
    source = torch.tensor([copier.tokenizer(text).input_ids])
    greedy = {"num_beams": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        forced = torch.tensor([given])
        out = copier.model.generate(source, decoder_input_ids=forced, max_new_tokens=20, **greedy)
        true = copier.model(source, decoder_input_ids=out.sequences[:, :-1]).logits[0, len(given) - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), true, atol=1e-4, rtol=1e-4)
    assert found[0].text == copier.tokenizer.decode(out.sequences[0], skip_special_tokens=True)


@pytest.mark.parametrize("search", [{"beams": 1}, {"beams": 4}])
def test_without_scores_the_texts_are_the_same_and_the_source_is_read_once(copier, search) -> None:
    reads: list[int] = []
    hook = copier.model.get_encoder().register_forward_hook(lambda *_: reads.append(1))
    try:
        scored = copier.translate(TEXTS, Search(**search))
        with_scores = len(reads)
        found = copier.translate(TEXTS, Search(**search), with_scores=False)
    finally:
        hook.remove()
    assert [[x.text for x in row] for row in found] == [[x.text for x in row] for row in scored]
    scores = [row[0].score for row, text in zip(found, TEXTS, strict=True) if text.strip()]
    assert all(map(math.isnan, scores))
    assert len(reads) - with_scores == with_scores // 2


def test_several_hypotheses_without_scores_are_refused(copier) -> None:
    with pytest.raises(ValueError, match=r"n_best must be 1 where with_scores is False; got 2\."):
        copier.translate(["cat"], Search(beams=2, n_best=2), with_scores=False)


@pytest.mark.parametrize("kind", ["none", "sinusoidal", "learned"])
def test_scores_in_small_parts_are_those_of_one_pass(copier, kind) -> None:
    translator = runs_on(copier, 100)
    config = translator.model.config.to_dict() | {"absolute_positions": kind, "relative_max_distance": 2}
    torch.manual_seed(3)
    model = RelposForConditionalGeneration(RelposConfig(**config)).eval()
    translator = Translator(model, copier.tokenizer)
    widths: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _, given, out: widths.append(out[..., 0].numel()))
    texts = ["red green", "blue one", "two three"]
    try:
        whole = translator.translate(texts, Search(beams=1, tokens_per_batch=4096), prefix="dog")
        assert max(widths) > 64
        widths.clear()
        parts = translator.translate(texts, Search(beams=1, tokens_per_batch=32), prefix="dog")
        assert max(widths) <= 32
    finally:
        hook.remove()
    assert [row[0].text for row in parts] == [row[0].text for row in whole]
    assert [row[0].score for row in parts] == pytest.approx([row[0].score for row in whole], abs=1e-5)


def test_sampling_is_reproduced_by_torchs_seed_and_differs_without(copier) -> None:
    search = Search(sample=True, n_best=3, temperature=2.0)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(copier.translate(TEXTS, search))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    for found in runs[0]:
        assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
        assert len(found) in (1, 3)


def test_a_line_far_longer_than_training_is_translated(copier) -> None:
    long = " ".join(sentences(15, 6, seed=3))
    (found,) = copier.translate([long], Search(beams=2))
    assert len(found[0].text) > 0
    assert found[0].score > -20


def runs_on(translator: Translator, max_positions: int, seed: int = 0) -> Translator:
    """A translator with so many learned positions, whose model has learned nothing and hardly ever ends."""
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "d_ff": 16}
    positions = {
        "absolute_positions": "learned",
        "max_positions": max_positions,
        "relative_max_distance": None,
    }
    settings = {**sizes, **positions, "vocab_size": len(translator.tokenizer), "tie_word_embeddings": False}
    config = RelposConfig(**settings)
    model = RelposForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[config.eos_token_id].zero_()
    return Translator(model, translator.tokenizer)


SEARCHES = [{"beams": 1}, {"beams": 3, "n_best": 2}, {"sample": True, "n_best": 2}]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("prefix", ["", "dog dog"])
def test_a_hypothesis_that_runs_on_stops_where_learned_positions_end(copier, search, prefix) -> None:
    text = "red green blue one two"  # room for 32 new subwords, were it not for the positions
    length = len(copier.tokenizer(text).input_ids)
    found = runs_on(copier, length + 3)
    generate, lengths = found.model.generate, []

    def recorded(**settings):
        sequences = generate(**settings)
        lengths.append(sequences.shape[1])
        return sequences

    found.model.generate = recorded
    torch.manual_seed(3)
    ((hypothesis, *_),) = found.translate([text], Search(**search), prefix=prefix)
    assert hypothesis.score < 0
    assert lengths == [length + 3 + 1]  # the start, and a token for each position


def test_learned_positions_far_away_change_no_limit(copier) -> None:
    near, far = runs_on(copier, 200), runs_on(copier, 200)
    far.model.config.max_positions = 10_000  # the table itself is as long as before
    texts = TEXTS[:4]
    assert near.translate(texts, Search(beams=2)) == far.translate(texts, Search(beams=2))


def test_a_source_beyond_learned_positions_is_refused_with_its_line_before_any_is_translated(copier) -> None:
    done: list[int] = []
    length = len(copier.tokenizer("cat dog").input_ids)
    translator = runs_on(copier, length)
    assert translator.translate(["cat dog"])
    longer = len(copier.tokenizer("cat dog red").input_ids)
    with pytest.raises(InputError) as raised:
        translator.translate(["cat", "", "cat dog red", "cat dog"], progress=done.append)
    assert str(raised.value) == (
        f"line 3 ('cat dog red') has {longer} subwords, and this model's learned positions end at {length}; "
        "split the line, or use a model with relative or sinusoidal positions."
    )
    assert done == []


def test_a_prefix_that_fills_learned_positions_is_refused(copier) -> None:
    prefix = " ".join(["dog"] * 20)
    length = len(copier.tokenizer(prefix).input_ids)  # the start in the place of the end
    assert runs_on(copier, length).translate(["cat"], prefix=prefix)
    with pytest.raises(InputError, match=rf"^the prefix has {length - 1} .* room for {length - 2};"):
        runs_on(copier, length - 1).translate(["cat"], prefix=prefix)


def test_the_models_mode_does_not_matter_and_is_restored_also_when_the_search_fails(
    copier, monkeypatch
) -> None:
    def fail(**_unused) -> None:
        raise RuntimeError("no memory")

    expected = best(copier, TEXTS[:4])
    copier.model.train()
    assert best(copier, TEXTS[:4]) == expected
    assert copier.model.training
    monkeypatch.setattr(copier.model, "generate", fail)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            copier.translate(["cat"])
        assert copier.model.training
    finally:
        copier.model.eval()


def test_progress_counts_each_text_once(copier) -> None:
    counts: list[int] = []
    copier.translate(TEXTS, Search(beams=1, tokens_per_batch=16), progress=counts.append)
    assert sum(counts) == len(TEXTS)
    assert len(counts) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({name: 0}, f"{name} must be at least 1; got 0")
            for name in ("beams", "n_best", "tokens_per_batch")
        ),
        ({"beams": 2, "n_best": 3}, "n_best must be at most beams = 2; got 3"),
        ({"sample": True, "temperature": 0.0}, "temperature must be from 0.001 to 1000; got 0.0"),
        ({"temperature": float("nan")}, "temperature must be from 0.001 to 1000; got nan"),
        ({"length_penalty": 1e308}, r"length_penalty must be from -5 to 5; got 1e\+308"),
        ({"length_penalty": float("nan")}, "length_penalty must be from -5 to 5; got nan"),
    ],
)
def test_wrong_settings_of_a_search_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Search(**settings)


def test_sampling_may_return_more_than_the_beams() -> None:
    assert Search(beams=1, n_best=5, sample=True).n_best == 5


def test_a_saved_translator_loads_and_says_the_same(copier, tmp_path: Path) -> None:
    copier.model.save_pretrained(tmp_path / "model")
    copier.tokenizer.save_pretrained(tmp_path / "model")
    for folder in (tmp_path, tmp_path / "model", str(tmp_path)):
        assert Translator.load(folder).translate(TEXTS[:4]) == copier.translate(TEXTS[:4])
    with pytest.raises(InputError, match="no such folder"):
        Translator.load(tmp_path / "nowhere")
