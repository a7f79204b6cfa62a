"""Numbers written out in words in two languages: an endless corpus whose every translation is known to be
right.

Word order differs inside a number ("twenty-one", "einundzwanzig"), and lines can be made of any length, so
the corpus shows how a model does on lengths it was not trained on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator
from typing_extensions import Self

from relpos.translation.errors import InputError

# English writes a comma inside a number above a thousand, and no semicolon
_SEPARATOR = "; "

# of all lines there are, one in this many is held out
_HELD_OUT_ONE_IN = 10

# so many draws in a row that were there before mean that hardly any new line is left
_MOST_REPEATS = 2_000


class NumberLines(BaseModel):
    """Lines of numbers in words. Lines of the two parts never meet, whatever the seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lines: PositiveInt = Field(description="How many lines to make.")
    shortest: PositiveInt = Field(default=1, description="Fewest numbers in a line.")
    longest: PositiveInt = Field(
        default=8, description="Most numbers in a line; each count is as likely as another."
    )
    largest: PositiveInt = Field(default=999, le=10**12, description="Numbers are drawn from 0 to this one.")
    seed: NonNegativeInt = Field(default=0, description="Another seed gives other lines.")
    part: Literal["train", "heldout"] = Field(
        default="train",
        description=f"Lines to draw from: one in {_HELD_OUT_ONE_IN} is held out, by a hash of the line.",
    )

    @model_validator(mode="after")
    def _shortest_is_not_longer(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest must be at most longest; got {self.shortest} and {self.longest}")
        return self


def write_numbers(
    spec: NumberLines, source_language: str, target_language: str
) -> Iterator[tuple[str, str, int]]:
    """Yield source, target, and how many numbers they hold; no line comes twice.

    Where the lines of one count run out, longer ones take their place.

    Raises:
        InputError: num2words is missing or does not know a language, or there are not so many different
            lines.
    """
    spell_source, spell_target = _speller(source_language), _speller(target_language)
    for numbers in _draw(spec):
        yield (
            _SEPARATOR.join(map(spell_source, numbers)),
            _SEPARATOR.join(map(spell_target, numbers)),
            len(numbers),
        )


def _draw(spec: NumberLines) -> Iterator[tuple[int, ...]]:
    # a text as a seed is hashed with SHA-512, the same on every machine
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
                    f"numbers: only {len(seen)} different lines were found for part {spec.part}, and lines: "
                    f"{spec.lines} asks for more; lower lines, or raise longest or largest."
                )
            continue
        repeats = 0
        seen.add(name)
        yield numbers


def _speller(language: str) -> Callable[[int], str]:
    """Return the function that writes a number in a language; it remembers what it wrote."""
    try:
        import num2words
    except ImportError as error:
        raise InputError('numbers need the package num2words; run `pip install "relpos[demo]"`.') from error
    known = {code.lower(): code for code in num2words.CONVERTER_CLASSES}
    tag = language.replace("-", "_").lower()
    code = known.get(tag) or known.get(tag.split("_")[0])
    if code is None:
        raise InputError(
            f"numbers cannot be written in {language!r}; num2words knows {', '.join(sorted(known))}."
        )

    @cache
    def spell(number: int) -> str:
        return str(num2words.num2words(number, lang=code))

    return spell
