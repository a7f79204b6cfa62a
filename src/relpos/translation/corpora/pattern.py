"""Regular expressions of people on text of strangers: Python's syntax, searched in bounded time.

Python's own `re` goes on for years where a pattern such as `(a|aa)+$` does not match; `regex` can be stopped.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

import regex

from relpos.translation.errors import InputError
from relpos.translation.limits import REGEX_SECONDS

# an escape, whole, so that its braces are left alone; or a brace that begins no count
_BRACE = re.compile(r"\\N\{[^}]*\}|\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)


@lru_cache(maxsize=8)
def compile_pattern(pattern: str) -> Any:
    """The regular expression `pattern`, in Python's syntax.

    Raises:
        ValueError: it is none, or one that later versions of Python will read otherwise.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)
        # to `regex` a{e} is an "a" with errors; to Python it is four characters
        plain = _BRACE.sub(lambda found: r"\{" if found[0] == "{" else found[0], pattern)
        return regex.compile(plain, regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:60]!r} is no regular expression: {error}") from error
    except Warning as warning:
        raise ValueError(
            f"{pattern[:60]!r} is ambiguous: {warning}; put \\ before the bracket or sign"
        ) from None


def matches(pattern: str, text: str, key: str) -> bool:
    """Whether `text` holds a match of `pattern`.

    Args:
        key: what the pattern is called in a message.
    Raises:
        InputError: that is not known after 2 seconds of this process's CPU time.
    """
    try:
        return compile_pattern(pattern).search(text, timeout=REGEX_SECONDS) is not None
    except TimeoutError:
        shown = text if len(text) <= 80 else f"{text[:80]} ..."
        raise InputError(
            f"{key}: {pattern[:80]!r} takes more than {REGEX_SECONDS:g} seconds on the text {shown!r}; "
            "write it without one repetition inside another."
        ) from None
