"""The smallest end-to-end test: numbers in words, learned from nothing and translated unseen."""

import json
from pathlib import Path

from relpos.translation.evaluation import evaluate
from relpos.translation.generation import Translator
from relpos.translation.preparation import read_parts
from relpos.translation.recipe import load_recipe


def test_unseen_lines_of_trained_lengths_are_translated_exactly(numbers_run: Path) -> None:
    recipe = load_recipe(str(numbers_run / "recipe.yaml"))
    parts, _ = read_parts(recipe.data, numbers_run / "cache")
    assert not set(parts["train"]["source"]) & set(parts["test"]["source"])
    result = evaluate(Translator.load(numbers_run), parts["test"], edges=[1, 2])
    assert result.scores.exact >= 0.95
    assert sum(bucket.scores.segments for bucket in result.buckets) == len(parts["test"])
    seconds = [
        json.loads(line)["seconds"] for line in (numbers_run / "metrics.jsonl").read_text().splitlines()
    ]
    print(f"exact {result.scores.exact:.1%} after {seconds[-1]:.0f} s")
