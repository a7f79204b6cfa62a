"""Recipes: what is packaged loads, what is wrong is answered with what is right, overrides arrive."""

import math
import os
import re
from pathlib import Path

import pytest
import yaml

from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError, UsageError
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


def test_there_are_packaged_recipes() -> None:
    assert {"messages", "numbers"} <= set(packaged_recipes())


@pytest.mark.parametrize("name", ["nowhere.yaml", "folder/nowhere.yaml", "massages", "."])
def test_a_recipe_that_does_not_exist_is_answered_with_those_that_do(name) -> None:
    with pytest.raises(
        UsageError, match=rf"^no recipe '{re.escape(name)}': give a YAML file, or .*messages.*\.$"
    ):
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
    values: dict = {
        "data": {
            "train": [{"tsv": "a.tsv"}, {"numbers": {"lines": 3}}],
            "validation": [{"files": ["a", "b"]}],
            "cleaning": {},
        },
        "tokenizer": {},
        "model": {},
        "training": {},
        "translation": {},
    }
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
        ("training", {"updates": "many"}, "mine.yaml: training.updates: input should be a valid integer"),
        ("training", {"updates": "many"}, "got 'many'"),
        ("training", {"updates": 0}, "mine.yaml: training.updates: input should be greater than 0; got 0"),
        ("training", {"updates": 1.5}, "training.updates: input should be a valid integer"),
        ("training", {"adam_betas": [0.9]}, "training.adam_betas.1"),
        ("training", {"best": "ter"}, "training.best: input should be 'loss', 'bleu' or 'chrf'; got 'ter'"),
        ("model", {"dropout": 1}, "model.dropout: input should be less than 1; got 1"),
        ("model", {"d_model": [512]}, "model.d_model: input should be a valid integer"),
        ("model", {"relative_max_distance": [1, 2, 3]}, "model.relative_max_distance"),
        ("model", {"relative_max_distance": -1}, "must be null, k >= 0 or [left, right]; got -1"),
        ("model", {"relative_max_distance": [2, -1]}, "mine.yaml: model.relative_max_distance: must be null"),
        ("model", {"d_model": 10, "num_heads": 3}, "num_heads must divide d_model = 10; got 3"),
        ("tokenizer", {"vocabulary": 300}, "tokenizer.vocabulary: input should be greater than 300; got 300"),
        ("format", 2, "mine.yaml: format: input should be 1; got 2"),
        ("tokenizer", 5, "mine.yaml: tokenizer: input should be"),
        ("data", {"train": []}, "mine.yaml: data.train: list should have at least 1 item"),
        ("data", {}, "mine.yaml: key 'data.train' is missing"),
        ("data", {"train": [{}]}, "data.train.0: a corpus has exactly one of"),
        ("training", {"adam_betas": [1.5, 0.98]}, "adam_betas.0: input should be less than 1; got 1.5"),
        ("training", {"adam_betas": [0.9, -0.1]}, "adam_betas.1: input should be greater than or equal to 0"),
        (
            "training",
            {"learning_rate_scale": math.inf},
            "learning_rate_scale: input should be a finite number",
        ),
        ("translation", {"length_penalty": math.nan}, "length_penalty: input should be a finite number"),
        ("training", {"updates": "100"}, "training.updates: input should be a valid integer; got '100'"),
        ("training", {"updates": True}, "training.updates: input should be a valid integer; got True"),
        ("training", {"minutes": "1"}, "training.minutes: input should be a valid number; got '1'"),
        ("model", {"norm_first": "off"}, "model.norm_first: input should be a valid boolean; got 'off'"),
        ("model", {"relative_max_distance": True}, "input should be a valid integer; got True"),
        ("model", {"relative_max_distance": [1, True]}, "input should be a valid integer; got True"),
        (
            "data",
            {"source_language": False},
            "data.source_language: input should be a valid string; got False",
        ),
        ("data", {"train": [{"tsv": 1}]}, "data.train.0.tsv: input is not a valid path"),
        (
            "data",
            {"train": [{"tsv": "a", "limit": "3"}]},
            "data.train.0.limit: input should be a valid integer",
        ),
        (
            "data",
            {"train": [{"tsv": "a", "columns": ["0", 1]}]},
            "columns.0: input should be a valid integer",
        ),
        ("data", {"train": [{"numbers": {"lines": True}}]}, "numbers.lines: input should be a valid integer"),
        (
            "data",
            SMALLEST["data"] | {"cleaning": {"max_ratio": math.inf}},
            "data.cleaning.max_ratio: input should be a finite number; got inf",
        ),
        (
            "data",
            SMALLEST["data"] | {"cleaning": {"drop_equal": "no"}},
            "data.cleaning.drop_equal: input should be a valid boolean; got 'no'",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_rule(section, values, told) -> None:
    assert told in refusal(SMALLEST | {section: values})


def test_training_pairs_longer_than_a_learned_table_are_refused() -> None:
    values = SMALLEST | {"model": {"absolute_positions": "learned", "max_positions": 64}}
    assert refusal(values) == (
        "mine.yaml: training.max_length must be at most model.max_positions = 64 where positions are "
        "learned; got 128"
    )
    check_recipe(values | {"training": {"max_length": 64}}, "mine.yaml")
    check_recipe(values | {"model": {"absolute_positions": "sinusoidal", "max_positions": 64}}, "mine.yaml")


def test_whole_numbers_lists_and_text_are_taken_for_numbers_tuples_and_paths() -> None:
    files = {"files": ["a", "b"]}, {"jsonl": "c", "fields": ["x", "y"]}, {"tsv": "d", "columns": [1, 0]}
    values = {
        "data": {"folder": "here", "train": [*files]},
        "training": {"minutes": 2, "adam_betas": [0, 0.5]},
    }
    found = check_recipe(values, "mine.yaml")
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


def test_a_recipe_without_data_says_so() -> None:
    assert refusal({}) == "mine.yaml: key 'data' is missing"


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
        (
            "data.train=[{tsv: b.tsv, limit: 3}]",
            lambda r: (r.data.train[0].tsv, r.data.train[0].limit),
            (Path.cwd() / "b.tsv", 3),
        ),
        ("data.cleaning.drop_matching=a=[b", lambda r: r.data.cleaning.drop_matching, None),
    ],
)
def test_an_override_reaches_its_key(written, override, read, value) -> None:
    path = written(yaml.safe_dump(SMALLEST))
    if override.endswith("[b"):
        with pytest.raises(UsageError, match="no regular expression"):
            load_recipe(path, [override])
    else:
        assert read(load_recipe(path, [override])) == value


def test_the_last_of_several_overrides_holds(written) -> None:
    found = load_recipe(written(yaml.safe_dump(SMALLEST)), ["training.seed=3", "training.seed=4"])
    assert found.training.seed == 4


def test_an_override_opens_a_section_left_empty(written) -> None:
    found = load_recipe(written("data: {train: [{tsv: a.tsv}]}\ntraining:\n"), ["training.seed=3"])
    assert found.training.seed == 3


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.updates", "option --training.updates needs a value: --training.updates VALUE."),
        ("data.source_language.x=1", "option --data.source_language.x: source_language holds one value"),
        ("training.updtes=1", "unknown key 'training.updtes'; the nearest is 'updates'"),
        ("trainig.updates=1", "unknown key 'trainig'; the nearest is 'training'"),
        ("training.updates=x", "training.updates: input should be a valid integer"),
    ],
)
def test_a_wrong_override_is_refused(written, override, told) -> None:
    path = written("data: {source_language: en, train: [{tsv: a.tsv}]}")
    with pytest.raises(UsageError) as caught:
        load_recipe(path, [override])
    assert told in str(caught.value)


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


def test_a_wrong_recipe_is_wrong_use_and_wrong_input() -> None:
    assert issubclass(UsageError, InputError)


def test_explained_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    for name in packaged_recipes():
        text = explain_recipe(load_recipe(name))
        (tmp_path / "explained.yaml").write_text(text, encoding="utf-8")
        assert load_recipe(str(tmp_path / "explained.yaml")) == load_recipe(name)
        assert "# Layers of the encoder." in text
