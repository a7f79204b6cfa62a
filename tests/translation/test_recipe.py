"""Recipes: what is packaged loads, what is wrong is answered with what is right, overrides arrive."""

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from relpos.translation.config import RelposConfig
from relpos.translation.errors import UsageError
from relpos.translation.recipe import (
    ModelSettings,
    Recipe,
    check_recipe,
    explain_recipe,
    load_recipe,
    located,
    packaged_recipes,
    write_recipe,
)
from relpos.translation.recipe_errors import _inner_model
from relpos.translation.strict_yaml import read_yaml

# nine times as many values in each line
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in itertools.pairwise("abcdefghijklmno")
)

SMALLEST = {"data": {"train": [{"tsv": "pairs.tsv"}]}}


def refusal(values: dict) -> str:
    """The message for `values`, which must be wrong."""
    with pytest.raises(UsageError) as caught:
        check_recipe(values, "mine.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def written(tmp_path: Path):
    """Write a recipe's text and return its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize("name", packaged_recipes())
def test_each_packaged_recipe_loads_and_makes_a_model(name) -> None:
    recipe = load_recipe(name)
    config = RelposConfig(vocab_size=recipe.tokenizer.vocabulary, **recipe.model.model_dump())
    assert config.d_model % config.num_heads == 0


def test_a_folder_is_no_recipe_and_that_of_a_run_names_its_own(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no regular file; give a YAML file\.$"):
        load_recipe(str(tmp_path))
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UsageError, match=r"give a YAML file, such as .*recipe\.yaml\.$"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere.yaml", "folder/nowhere.yaml", "massages"])
def test_a_recipe_that_does_not_exist_is_answered_with_those_that_do(name) -> None:
    told = rf"^no recipe '{re.escape(name)}': give a YAML file, or .*messages.*numbers.*\.$"
    with pytest.raises(UsageError, match=told):
        load_recipe(name)


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ((), "trainin", "training"),
        (("data",), "trian", "train"),
        (("data", "cleaning"), "max_word", "max_words"),
        (("data", "train", 0), "tvs", "tsv"),
        (("data", "validation", 0), "file", "files"),
        (("data", "train", 1, "numbers"), "longst", "longest"),
        (("tokenizer",), "vocabulari", "vocabulary"),
        (("model",), "relative_max_distanc", "relative_max_distance"),
        (("training",), "update", "updates"),
        (("translation",), "beam", "beams"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(section, key, nearest) -> None:
    sources = {"train": [{"tsv": "a.tsv"}, {"numbers": {"lines": 3}}], "validation": [{"files": ["a", "b"]}]}
    values: dict = {name: {} for name in ("tokenizer", "model", "training", "translation")}
    values["data"] = {**sources, "cleaning": {}}
    place = values
    for part in section:
        place = place[part]
    place[key] = 1
    full = ".".join(map(str, (*section, key)))
    told = refusal(values)
    assert f"mine.yaml: unknown key '{full}'; the nearest is '{nearest}'" in told


def test_an_unknown_key_near_to_none_is_answered_with_all() -> None:
    told = refusal(SMALLEST | {"translation": {"qqqqq": 1}})
    assert told == "mine.yaml: unknown key 'translation.qqqqq'; known here: beams, length_penalty"


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("training", {"updates": "100"}, "mine.yaml: training.updates must be a whole number; got '100'"),
        ("training", {"updates": 0}, "mine.yaml: training.updates must be over 0; got 0"),
        ("training", {"updates": 1.5}, "training.updates must be a whole number"),
        ("training", {"adam_betas": [0.9]}, "training.adam_betas must be a list of 2 values; got [0.9]"),
        ("training", {"best": "ter"}, "training.best must be 'loss', 'bleu' or 'chrf'; got 'ter'"),
        ("model", {"dropout": 1}, "model.dropout must be under 1; got 1"),
        ("model", {"relative_max_distance": [1, 2, 3]}, "model.relative_max_distance"),
        ("model", {"relative_max_distance": -1}, "must be null, k >= 0 or [left, right]; got -1"),
        ("model", {"d_model": 10, "num_heads": 3}, "num_heads must divide d_model = 10; got 3"),
        ("tokenizer", {"vocabulary": 300}, "tokenizer.vocabulary must be at least 301; got 300"),
        ("format", 2, "mine.yaml: format must be 1; got 2"),
        ("tokenizer", 5, "tokenizer must be a mapping of keys to values; got 5; its keys are vocabulary"),
        ("data", {"train": []}, "mine.yaml: data.train must hold at least 1 value"),
        ("data", {}, "mine.yaml: key 'data.train' is missing"),
        ("data", {"train": [{}]}, "data.train.0: a corpus has exactly one of"),
        ("training", {"adam_betas": [1.5, 0.98]}, "adam_betas.0 must be under 1; got 1.5"),
        ("training", {"learning_rate_scale": math.inf}, "learning_rate_scale must be a finite number"),
        ("translation", {"length_penalty": math.nan}, "length_penalty must be a finite number"),
        ("training", {"updates": True}, "training.updates must be a whole number; got true"),
        ("model", {"norm_first": "off"}, "model.norm_first must be true or false; got 'off'"),
        ("model", {"relative_max_distance": True}, "must be null, k >= 0 or [left, right]; got true"),
        ("model", {"relative_max_distance": [1, True]}, "k >= 0 or [left, right]; got [1, true]"),
        ("data", {"source_language": False}, "data.source_language must be text; got false"),
        ("data", {"train": [{"tsv": 1}]}, "data.train.0.tsv must be a path"),
        ("data", {"train": [{"tsv": "a", "limit": "3"}]}, "data.train.0.limit must be a whole number"),
        ("data", {"train": [{"tsv": "a", "columns": ["0", 1]}]}, "columns.0 must be a whole number"),
        ("data", {"train": [{"numbers": {"lines": True}}]}, "numbers.lines must be a whole number"),
        (
            "data",
            {"cleaning": {"max_ratio": math.inf}},
            "cleaning.max_ratio must be a finite number; got inf",
        ),
        ("data", {"cleaning": {"drop_equal": "no"}}, "cleaning.drop_equal must be true or false; got 'no'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_rule(section, values, told) -> None:
    assert told in refusal(SMALLEST | {section: values})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("training: {minutes: none}", "training.minutes must be a number; got 'none'; write null"),
        ("training: {patience: None}", "training.patience must be a whole number; got 'None'; write null"),
        ("model: {relative_max_distance: none}", "must be null, k >= 0 or [left, right]; got 'none'"),
        ("model: {absolute_positions: null}", "or 'learned'; got null; leave out the key for its default"),
        ("model: {absolute_positions: sinusoid}", "got 'sinusoid'; the nearest is 'sinusoidal'"),
        ("model: {norm_first: 1}", "model.norm_first must be true or false; got 1"),
        ("training: {updates: 1,000}", "unknown key 'training.0'"),
        ("training: {updates: '1,000'}", "got '1,000'; write 1000, without quotes or commas"),
        ("training: {updates: 1e5}", "training.updates must be a whole number; got 100000.0; write 100000"),
        ("training: {adam_betas: 0.9}", "training.adam_betas must be a list of 2 values; got 0.9"),
        ("training: [updates, 3]", "training must be a mapping of keys to values; got ['updates', 3]"),
        ("training: null", "training must be a mapping of keys to values; got null; leave out the key"),
        ("training: {3: 4}", "unknown key 'training.3'"),
        ("translation: {length_penalty: 1e308}", "translation.length_penalty must be at most 5; got 1e+308"),
        ("translation: {length_penalty: -6}", "translation.length_penalty must be at least -5; got -6"),
        ("tokenizer: {vocabulary: " + "9" * 5000 + "}", "not valid YAML (a number of too many digits)"),
    ],
)
def test_what_people_write_in_yaml_is_answered_with_what_to_write(written, text, told) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(written(f"data:\n  train: [{{tsv: a.tsv}}]\n{text}"))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: {tsv: a.tsv}", "data.train must be a list; got {tsv: 'a.tsv'}; write [{tsv: 'a.tsv'}]"),
        ("train: a.tsv", "data.train must be a list; got 'a.tsv'; write ['a.tsv']"),
        ("train: [a.tsv]", "data.train.0 must be a mapping of keys to values; got 'a.tsv'; its keys are tsv"),
        ("train: null", "mine.yaml: data.train must be a list; got null"),
        ("train: [{files: a.en}]", "data.train.0.files must be a list of 2 values; got 'a.en'"),
        ("train: [{catalogs: gramps}]", "catalogs must be a list; got 'gramps'; write ['gramps']"),
        ("train: [{tsv: [a.tsv]}]", "tsv must be a path; got ['a.tsv']; write a.tsv without brackets"),
        ("train: [{tsv: a, limit: none}]", "limit must be a whole number; got 'none'; write null"),
        ("train: [{dataset: 2024}]", "dataset must be text; got 2024; put it in quotes: '2024'"),
        ("target_language: no, train: []", "got false; YAML reads no, off and false as false: put the word"),
        ("target_language: on, train: []", "got true; YAML reads yes, on and true as true: put the word in"),
        ("target_language: null, train: []", "target_language must be text; got null; leave out the key"),
        ("train: [{tsv: a}], cleaning: {drop_matching: none}", "drop_matching: must be null or a regular"),
        ("train: [{tsv: a}], cleaning: {max_ratio: '1,5'}", "must be a number; got '1,5'"),
    ],
)
def test_what_people_write_for_data_is_answered_with_what_to_write(written, text, told) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(written(f"data: {{{text}}}"))
    assert told in str(caught.value)


def _keys(model: type[BaseModel], where: tuple = ()) -> list[tuple]:
    """Every key of a recipe, a source's among them."""
    found = []
    for name, field in model.model_fields.items():
        inner = _inner_model(field.annotation)
        is_list = name in ("train", "validation", "test")
        found += [(*where, name)]
        found += _keys(inner, (*where, name, 0) if is_list else (*where, name)) if inner else []
    return found


@pytest.mark.parametrize("key", _keys(Recipe), ids=str)
def test_no_wrong_value_of_any_key_is_answered_in_the_words_of_a_library(key) -> None:
    wrong = [None, True, -1, 0, 0.5, math.nan, 1e308, 2**62, "none", "x" * 9999, "\n", [], [[]], ["x"], {}]
    wrong += [{"x": 1}, {1: 2}, [1, 2, 3], "no", {None: None}]
    for value in wrong:
        values: dict = {"data": {"train": [{"tsv": "a.tsv"}]}}
        place: Any = values
        for part, after in itertools.pairwise(key):
            if isinstance(place, list):
                place.extend([{}] if not place else [])
                place = place[0]
            else:
                place = place.setdefault(part, [] if after == 0 else {})
        if isinstance(place, list):
            place = place[0]
        place[key[-1]] = value
        try:
            check_recipe(values, "mine.yaml")
        except UsageError as error:
            told = str(error)
            assert told.startswith("mine.yaml: "), told
            assert len(told) < 1500, told
            assert "\n" not in told
            for words in ("nput should", "valid ", "Value error", "pydantic", "None", "another value"):
                assert words not in told, (value, told)


def test_training_pairs_longer_than_a_learned_table_are_refused() -> None:
    values = SMALLEST | {"model": {"absolute_positions": "learned", "max_positions": 64}}
    told = "training.max_length must be at most model.max_positions = 64 where positions are learned; got 128"
    assert refusal(values) == f"mine.yaml: {told}"
    check_recipe(values | {"training": {"max_length": 64}}, "mine.yaml")
    check_recipe(values | {"model": {"absolute_positions": "sinusoidal", "max_positions": 64}}, "mine.yaml")


def test_whole_numbers_lists_and_text_are_taken_for_numbers_tuples_and_paths() -> None:
    files = {"files": ["a", "b"]}, {"jsonl": "c", "fields": ["x", "y"]}, {"tsv": "d", "columns": [1, 0]}
    data, training = {"folder": "here", "train": [*files]}, {"minutes": 2, "adam_betas": [0, 0.5]}
    found = check_recipe({"data": data, "training": training}, "mine.yaml")
    assert found.data.folder == Path("here")
    assert found.data.train[0].files == (Path("a"), Path("b"))
    assert found.data.train[1].fields == ("x", "y")
    assert found.data.train[2].columns == (1, 0)
    assert (found.training.minutes, found.training.adam_betas) == (2.0, (0.0, 0.5))


@pytest.mark.parametrize("number", ["1e-9", "1.0e-9", "+1E-9", ".1e-8", "1.e-9", "0.0000000001e1"])
def test_a_number_with_an_exponent_is_a_number_however_it_is_written(written, number) -> None:
    path = written(f"data: {{train: [{{tsv: a.tsv}}]}}\ntraining: {{adam_epsilon: {number}}}")
    assert load_recipe(path).training.adam_epsilon == pytest.approx(1e-9)
    assert load_recipe(path, [f"training.adam_epsilon={number}"]).training.adam_epsilon == pytest.approx(1e-9)


def test_a_recipe_survives_a_full_disk_while_it_is_written_again(tmp_path, monkeypatch) -> None:
    path = tmp_path / "recipe.yaml"
    write_recipe(check_recipe(SMALLEST, "mine.yaml"), path)

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_recipe(check_recipe(SMALLEST | {"training": {"updates": 3}}, "mine.yaml"), path)
    assert load_recipe(str(path)) == located(check_recipe(SMALLEST, "mine.yaml"))
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.yaml"]


def test_at_most_three_faults_are_told_at_once() -> None:
    told = refusal(SMALLEST | {"training": {f"key_{i}": i for i in range(9)}})
    assert told.count("unknown key") == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data:\n  train: [\ntraining: {", r"mine\.yaml, line \d+: not valid YAML \(.+\)\.$"),
        ("data:\n\ttrain: 1", r"mine\.yaml, line 2: not valid YAML"),
        ("a: b: c", r"mine\.yaml, line 1: not valid YAML"),
        ("a: \x00", r"mine\.yaml.*: not valid YAML \(.+\)\.$"),
        ("", r"mine\.yaml: a recipe is a mapping of keys to values; got nothing\.$"),
        ("- data", r"mine\.yaml: a recipe is a mapping of keys to values; got list\.$"),
        ("data", r"mine\.yaml: a recipe is a mapping of keys to values; got str\.$"),
        ("a: 1\nb: 2\na: 3", r"line 3: not valid YAML \(key 'a' stands there twice, first in line 1\)\.$"),
        ("[" * 20_000, r"mine\.yaml, line 1: not valid YAML \(nested more than 50 levels deep\)\.$"),
        ("{a: " * 20_000, r"nested more than 50 levels deep"),
        ("- " * 20_000, r"nested more than 50 levels deep"),
        ("? " * 20_000, r"nested more than 50 levels deep"),
        (BOMB, r"more than 100,000 values, aliases written out"),
        ("a: &a [*a]", r"line 1: not valid YAML \(an alias inside of what it stands for\)"),
        ("a: &a {b: *a}", r"an alias inside of what it stands for"),
        ("a: 0x" + "f" * 5000, r"line 1: not valid YAML \(a number of too many digits\)"),
        ("a: " + "1:" * 3000 + "1", r"a number of too many digits"),
        ("a: !!int x", r"line 1: not valid YAML \(a value that its tag does not fit\)"),
        ("a: !!bool x", r"a value that its tag does not fit"),
        ("a: !!timestamp 2024-13-45", r"line 1: not valid YAML \(could not determine a constructor"),
        ("--- a\n--- b", r"line 2: not valid YAML \(expected a single document in the stream, but"),
        ("data: 2024-13-45", r"mine\.yaml: data must be a mapping of keys to values; got '2024-13-45'; "),
        ("#" * 300_000, r"mine\.yaml: a recipe must have at most 262,144 bytes; got 300,000\."),
        (b"PK\x03\x04" + bytes(99), r"mine\.yaml is a zip archive; "),
        (b"\x1f\x8b" + bytes(99), r"mine\.yaml: not UTF-8 at byte 1"),
        (b"data: \xff", r"mine\.yaml: not UTF-8 at byte 6\. Save the recipe as UTF-8\.$"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(written, text, told) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        load_recipe(written(text))
    assert "\n" not in str(caught.value)


def test_python_tags_in_yaml_are_refused_and_not_run(written, tmp_path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(UsageError, match="not valid YAML"):
        load_recipe(written(f"data: !!python/object/apply:os.mkdir ['{mark}']"))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("training.updates=7", lambda r: r.training.updates, 7),
        ("model.relative_max_distance=null", lambda r: r.model.relative_max_distance, None),
        ("model.relative_max_distance=[4, 2]", lambda r: r.model.relative_max_distance, (4, 2)),
        ("model.relative_max_distance=0", lambda r: r.model.relative_max_distance, 0),
        ("model.norm_first=false", lambda r: r.model.norm_first, False),
        ("training.adam_betas=[0.8, 0.9]", lambda r: r.training.adam_betas, (0.8, 0.9)),
        ("training.adam_epsilon=1e-7", lambda r: r.training.adam_epsilon, 1e-7),
        ("data.cleaning.max_words=9", lambda r: r.data.cleaning.max_words, 9),
        ("data.cleaning.max_ratio=null", lambda r: r.data.cleaning.max_ratio, None),
        ("data.source_language=fr", lambda r: r.data.source_language, "fr"),
        ("data.train=[{tsv: b, limit: 3}]", lambda r: r.data.train[0].tsv, Path.cwd() / "b"),
        ("data.cleaning.drop_matching=a=b", lambda r: r.data.cleaning.drop_matching, "a=b"),
    ],
)
def test_an_override_reaches_its_key(written, override, read, value) -> None:
    assert read(load_recipe(written(yaml.safe_dump(SMALLEST)), [override])) == value


def test_the_last_of_several_overrides_holds_and_opens_a_section_left_empty(written) -> None:
    path = written("data: {train: [{tsv: a.tsv}]}\ntraining:\n")
    assert load_recipe(path, ["training.seed=3", "training.seed=4"]).training.seed == 4


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.updates", "option --training.updates needs a value: --training.updates VALUE."),
        ("data.source_language.x=1", "option --data.source_language.x: source_language holds one value"),
        ("training.updtes=1", "unknown key 'training.updtes'; the nearest is 'updates'"),
        ("trainig.updates=1", "unknown key 'trainig'; the nearest is 'training'"),
        ("training.updates=x", "training.updates must be a whole number"),
    ],
)
def test_a_wrong_override_is_refused(written, override, told) -> None:
    path = written("data: {source_language: en, train: [{tsv: a.tsv}]}")
    with pytest.raises(UsageError) as caught:
        load_recipe(path, [override])
    assert told in str(caught.value)


@pytest.mark.parametrize("value", ["[[[[", "[" * 20_000, "{a: ", "2024-13-45", "*a", "!!int x"])
def test_an_override_that_is_no_yaml_is_text(written, value) -> None:
    path = written(yaml.safe_dump(SMALLEST))
    assert load_recipe(path, [f"data.source_language={value}"]).data.source_language == value
    with pytest.raises(UsageError, match=r"training.updates must be a whole number; got '"):
        load_recipe(path, [f"training.updates={value}"])


def test_an_override_that_is_not_utf8_is_refused(written) -> None:
    with pytest.raises(UsageError, match=r"option --data.source_language: its value is not UTF-8"):
        load_recipe(written(yaml.safe_dump(SMALLEST)), ["data.source_language=\udcff"])


def test_anchors_and_merged_keys_are_read(written) -> None:
    text = "data: {train: &all [{tsv: a.tsv}], validation: *all}\nmodel: &m {d_ff: 8}\n"
    found = load_recipe(written(text))
    assert found.data.validation == found.data.train
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}")["b"] == {"x": 2}


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_written_recipe_reads_back_the_same(name, tmp_path) -> None:
    recipe = load_recipe(name, ["model.relative_max_distance=[3, 1]", "data.target_language=ü"])
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")) == located(recipe)


def test_names_that_look_like_numbers_stay_names(tmp_path) -> None:
    names = ["1e5", "1e-9", "7", "1.5", "true", "null", "no"]
    train = [{"dataset": name, "config": name, "fields": [name, "x"]} for name in names]
    recipe = check_recipe({"data": {"train": train, "source_language": "no"}}, "mine.yaml")
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")) == located(recipe)


def test_a_written_recipe_holds_every_key(tmp_path) -> None:
    recipe = check_recipe(SMALLEST, "mine.yaml")
    write_recipe(recipe, tmp_path / "recipe.yaml")
    held = yaml.safe_load((tmp_path / "recipe.yaml").read_text("utf-8"))
    assert list(held) == list(Recipe.model_fields)
    for section in ("data", "model", "training", "translation", "tokenizer"):
        assert list(held[section]) == list(type(getattr(recipe, section)).model_fields)


def test_model_settings_are_those_of_the_configuration_with_its_defaults() -> None:
    config = RelposConfig()
    for name, field in ModelSettings.model_fields.items():
        assert getattr(config, name) == field.default, name


def _inner(schema: dict) -> list[dict]:
    return [schema, *schema.get("$defs", {}).values()]


def test_every_key_has_a_description() -> None:
    schemas = _inner(Recipe.model_json_schema())
    assert len(schemas) >= 8
    for schema in schemas:
        for name, field in schema.get("properties", {}).items():
            # a section has the description of its class
            told = field.get("description") or ("$ref" in field) or ("allOf" in field)
            assert told, f"{schema.get('title')}.{name}"


def test_explained_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    for name in packaged_recipes():
        text = explain_recipe(load_recipe(name))
        (tmp_path / "explained.yaml").write_text(text, encoding="utf-8")
        assert load_recipe(str(tmp_path / "explained.yaml")) == load_recipe(name)
        assert "# Layers of the encoder." in text
