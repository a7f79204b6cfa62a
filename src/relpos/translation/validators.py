"""Validators for values in untrusted files: each has a test, and words for the error message."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A validator: `fits(value)` tests a value, and `words` complete the message "must be ..."."""

    words: str
    fits: Callable[[Any], bool]


def check(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for the first of `values` that breaks its rule; values without a rule are accepted."""
    for name, value in values.items():
        if name in rules and not rules[name].fits(value):
            raise ValueError(f"{name} must be {rules[name].words}; got {shown(value)}.")


def shown(value: object) -> str:
    """`value` for a message: one short line, even for long or deeply nested values."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):
        # an int with thousands of digits
        return f"a value of {type(value).__name__} that is too long to show"


def integer(low: int, high: int) -> Rule:
    """An int; a bool is refused."""
    return Rule(
        f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high
    )


def number(low: float, high: float) -> Rule:
    """An int or a float; neither NaN nor infinite."""
    return Rule(
        f"a number from {low:,} to {high:,}",
        lambda value: type(value) in (int, float) and low <= value <= high,
    )


def boolean() -> Rule:
    """A bool."""
    return Rule("true or false", lambda value: type(value) is bool)


def text(longest: int = 1000) -> Rule:
    """A string of at most `longest` characters."""
    return Rule("a short text", lambda value: type(value) is str and len(value) <= longest)


def one_of(*choices: object) -> Rule:
    """One of `choices`, equal in type too, so that 0 is not False."""
    return Rule(
        f"one of {choices}" if len(choices) > 1 else repr(choices[0]),
        lambda value: any(type(value) is type(choice) and value == choice for choice in choices),
    )


def optional(rule: Rule) -> Rule:
    """None, or a value that fits `rule`."""
    return Rule(f"{rule.words}, or null", lambda value: value is None or rule.fits(value))


def list_of(rule: Rule, low: int, high: int) -> Rule:
    """A list or tuple of `low` to `high` values that fit `rule`."""
    return Rule(
        f"a list of {low:,} to {high:,} values, each {rule.words}",
        lambda value: (
            isinstance(value, (list, tuple)) and low <= len(value) <= high and all(map(rule.fits, value))
        ),
    )


def dict_of(key: Rule, rule: Rule, most: int) -> Rule:
    """A dict of at most `most` entries; keys fit `key`, and values fit `rule`."""
    return Rule(
        f"an object of at most {most:,} values, each {rule.words}",
        lambda value: (
            isinstance(value, dict)
            and len(value) <= most
            and all(map(key.fits, value))
            and all(map(rule.fits, value.values()))
        ),
    )


def either(first: Rule, second: Rule) -> Rule:
    """A value that fits one of the two rules."""
    return Rule(f"{first.words}, or {second.words}", lambda value: first.fits(value) or second.fits(value))
