"""Which keys of a recipe may differ when a run is resumed, and which may not: each is one or the other."""

import json
from typing import Any

import pytest

from relpos.translation.errors import InputError
from relpos.translation.recipe import (
    DataSettings,
    ModelSettings,
    Recipe,
    TokenizerSettings,
    TrainingSettings,
)
from relpos.translation.runs import _cut_metrics, begin_run, resume_run, working_in_run

# other values of these leave the updates that were made as they are
MAY_CHANGE = {"updates": 9, "minutes": 1.5, "log_every": 7, "evaluate_every": 7, "validation_pairs": 7}
MAY_CHANGE |= {"patience": 3, "keep": 9, "average": 2}
SECTIONS = {"data": DataSettings, "tokenizer": TokenizerSettings, "model": ModelSettings}
SECTIONS |= {"training": TrainingSettings}
# where the text lies is no setting of the updates
GUARDED = [
    (section, key)
    for section, settings in SECTIONS.items()
    for key in settings.model_fields
    if (section, key) != ("data", "folder") and not (section == "training" and key in MAY_CHANGE)
]


def changed(recipe: Recipe, section: str, key: str, value: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={key: value})})


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value} 2"
    if isinstance(value, tuple):
        return value[::-1]
    if isinstance(value, list):
        return [*value, *value]
    (key, inner), *_ = value
    return value.model_copy(update={key: other(inner)})


def test_every_kind_of_setting_is_guarded() -> None:
    assert len(GUARDED) > 30
    assert {section for section, _ in GUARDED} == set(SECTIONS)
    assert MAY_CHANGE.keys() < TrainingSettings.model_fields.keys()


@pytest.mark.parametrize(("section", "key"), GUARDED)
def test_resuming_with_another_value_is_refused_by_name(small_recipe, tmp_path, section, key) -> None:
    recipe = small_recipe()
    with working_in_run(tmp_path / "run"):
        begin_run(recipe, tmp_path / "run")
    value = getattr(getattr(recipe, section), key)
    # two lists may be empty, and then are not given twice
    another = other(value) if value != [] else recipe.data.train
    assert another != value
    with pytest.raises(InputError, match=rf"other settings: {section}\.{key} was "):
        resume_run(changed(recipe, section, key, another), tmp_path / "run", lambda line: None)


@pytest.mark.parametrize(("key", "value"), MAY_CHANGE.items())
def test_resuming_with_another_value_of_the_rest_goes_on(small_recipe, tmp_path, key, value) -> None:
    recipe = small_recipe()
    assert getattr(recipe.training, key) != value
    with working_in_run(tmp_path / "run"):
        begin_run(recipe, tmp_path / "run")
    assert not resume_run(changed(recipe, "training", key, value), tmp_path / "run", print).is_finished


def test_lines_of_updates_that_are_repeated_are_dropped(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [(step, json.dumps({"step": step})) for step in (2, 4, 6)]
    file.write_text("".join(f"{line}\n" for _, line in lines))
    _cut_metrics(file, lines, 4)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [2, 4]
