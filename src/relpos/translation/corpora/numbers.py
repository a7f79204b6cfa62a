"""Numbers in words in two languages: a generated corpus whose translations are all correct.

Word order differs inside a number ("twenty-one", "einundzwanzig"), and lines can have any length, so the
corpus measures a model on lengths it was not trained on.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator
from typing_extensions import Self

from relpos.translation.corpora.language_tags import base_language, normalize
from relpos.translation.errors import InputError

# English writes a comma inside a number above a thousand, and no semicolon
_SEPARATOR = "; "

# one in this many of all possible lines is held out
_HELD_OUT_ONE_IN = 10

# after this many repeated draws in a row hardly any new line is left
_MOST_REPEATS = 2_000


class NumberLines(BaseModel):
    """Lines of numbers in words. The two parts share no line, whatever the seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lines: PositiveInt = Field(description="Number of lines.")
    shortest: PositiveInt = Field(default=1, description="Fewest numbers in a line.")
    longest: PositiveInt = Field(
        default=8, description="Most numbers in a line; all counts are equally likely."
    )
    largest: PositiveInt = Field(default=999, le=10**12, description="Numbers are drawn from 0 to this one.")
    seed: NonNegativeInt = Field(default=0, description="Seed of the lines.")
    part: Literal["train", "heldout"] = Field(
        default="train",
        description=f"train or heldout; one line in {_HELD_OUT_ONE_IN} is held out, chosen by its hash.",
    )

    @model_validator(mode="after")
    def _shortest_is_not_longer(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest must be at most longest; got {self.shortest} and {self.longest}")
        return self


def write_numbers(
    spec: NumberLines, source_language: str, target_language: str
) -> Iterator[tuple[str, str, int]]:
    """Yield source, target and their count of numbers, without repeating a line.

    When all lines of one count have been used, longer lines take their place.

    Raises:
        InputError: num2words is missing or does not know a language, or there are too few different lines.
    """
    spell_source, spell_target = _speller(source_language), _speller(target_language)
    for numbers in _draw(spec):
        yield (
            _SEPARATOR.join(map(spell_source, numbers)),
            _SEPARATOR.join(map(spell_target, numbers)),
            len(numbers),
        )


def _draw(spec: NumberLines) -> Iterator[tuple[int, ...]]:
    # random.Random hashes a text seed with SHA-512, the same on every machine
    draw = random.Random(f"{spec.seed} {spec.part}")
    seen: set[int] = set()
    repeats = 0
    while len(seen) < spec.lines:
        count = draw.randint(spec.shortest, spec.longest)
        numbers = tuple(draw.randint(0, spec.largest) for _ in range(count))
        name = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
        is_held_out = name % _HELD_OUT_ONE_IN == 0
        if name in seen or is_held_out != (spec.part == "heldout"):
            repeats += 1
            if repeats > _MOST_REPEATS:
                raise InputError(
                    f"numbers: only {len(seen)} different lines were found for part {spec.part}; got lines: "
                    f"{spec.lines}. Lower lines, or raise longest or largest."
                )
            continue
        repeats = 0
        seen.add(name)
        yield numbers


def _speller(language: str) -> Callable[[int], str]:
    """A cached function that writes a number in words of `language`."""
    try:
        import num2words
    except ImportError as error:
        raise InputError('numbers need the package num2words; run `pip install "relpos[demo]"`.') from error
    known = {code.lower(): code for code in num2words.CONVERTER_CLASSES}
    code = known.get(normalize(language)) or known.get(base_language(language))
    if code is None:
        raise InputError(
            f"numbers cannot be written in {language!r}; num2words knows {', '.join(sorted(known))}."
        )

    @cache
    def spell(number: int) -> str:
        return str(num2words.num2words(number, lang=code))

    return spell
