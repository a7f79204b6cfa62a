"""Hostile inputs of the command: text, options, recipes, corpora, model folders and runs, from a seed."""

from pathlib import Path
from random import Random

from hostile import corpora, models, options, recipes, runs, text
from hostile.case import Case, Material

# how many of fifty cases are of each kind: more of those that cost little
_SHARES = {text.make: 13, options.make: 13, recipes.make: 10}
_SHARES |= {corpora.make: 5, models.make: 5, runs.make: 4}
# spread, so that any part of the cases has some of each kind
_ROUND = Random(0).sample([make for make, share in _SHARES.items() for _ in range(share)], 50)


def make_case(number: int, home: Path, material: Material) -> Case:
    """The case `number`, with its files in `home`; the same each time."""
    make = _ROUND[number % len(_ROUND)]
    random = Random(f"hostile input {number}")
    for name in ("thesis.txt", "notes/plan.md", ".hidden", "model.part", "checkpoint-5"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(f"mine, {name}\n")
    return make(random, home, material)
