"""Regular expressions in Python's syntax, with a time limit on each search.

Python's `re` has no timeout and can take years on a pattern such as `(a|aa)+$`; `regex` has one.
"""

import re
import warnings
from functools import lru_cache
from typing import Any

import regex

from relpos.translation.errors import InputError

# CPU seconds for searching one text; a sane pattern needs microseconds
REGEX_SECONDS = 2.0

# an escape, so that its braces are not matched alone; or a brace that does not begin a count
_BRACE = re.compile(r"\\N\{[^}]*\}|\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)


@lru_cache(maxsize=8)
def compile_pattern(pattern: str) -> Any:
    """The compiled regular expression `pattern`, in Python's syntax.

    Raises:
        ValueError: the pattern is invalid, or Python warns that its meaning will change.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)
        # `regex` reads a{e} as an "a" with errors, Python as four characters
        plain = _BRACE.sub(lambda found: r"\{" if found[0] == "{" else found[0], pattern)
        return regex.compile(plain, regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:60]!r} is not a regular expression: {error}") from error
    except Warning as warning:
        raise ValueError(
            f"{pattern[:60]!r} is ambiguous: {warning}; put \\ before the bracket or sign"
        ) from None


def matches(pattern: str, text: str, key: str) -> bool:
    """Whether `text` contains a match of `pattern`.

    Args:
        key: name of the pattern in error messages.
    Raises:
        InputError: the search takes more than 2 seconds of this process's CPU time.
    """
    try:
        return compile_pattern(pattern).search(text, timeout=REGEX_SECONDS) is not None
    except TimeoutError:
        shown = text if len(text) <= 80 else f"{text[:80]} ..."
        raise InputError(
            f"{key}: {pattern[:80]!r} takes more than {REGEX_SECONDS:g} seconds on the text {shown!r}; "
            "rewrite it without nested repetitions."
        ) from None
