"""The demo's recipes, trained as a user gets them; minutes each, so not part of `make test`."""

from pathlib import Path

import pytest

from relpos.translation.evaluation import evaluate
from relpos.translation.generation import Translator
from relpos.translation.preparation import read_parts
from relpos.translation.recipe import load_recipe
from relpos.translation.training import train


@pytest.mark.slow
def test_numbers_recipe_learns_the_lengths_that_it_is_trained_on(tmp_path: Path) -> None:
    recipe = load_recipe("numbers")
    train(recipe, tmp_path / "run")
    parts, _ = read_parts(recipe.data, tmp_path / "run" / "cache")
    trained = parts["test"].filter(lambda row: row["items"] <= 5)
    assert evaluate(Translator.load(tmp_path / "run"), trained).scores.exact >= 0.9


@pytest.mark.slow
def test_messages_recipe_learns_some_german(tmp_path: Path) -> None:
    recipe = load_recipe("messages")
    train(recipe, tmp_path / "run")
    parts, summary = read_parts(recipe.data, tmp_path / "run" / "cache")
    assert summary["kept"] > 8000
    # a model that ignores its source stays below 20
    assert evaluate(Translator.load(tmp_path / "run"), parts["test"]).scores.chrf >= 25
