"""What is left of a text without what may vary: its placeholders, its words, its skeleton."""

from __future__ import annotations

import re
from collections import Counter

_PLACEHOLDER = re.compile(
    r"""
      %\(\w+\)[#0+-]*\d*(?:\.\d+)?[a-zA-Z]             # %(name)s
    | (?<![\d%])%\d+\$[#0+-]*\d*(?:\.\d+)?[a-zA-Z]     # %1$s
    | (?<![\d%])%[#0+-]*(?:\d+|\*)?(?:\.\d+)?(?:hh?|ll?|z)?[diouxXeEfFgGcrsn](?![^\W\d_])  # %s, %5.2f
    | (?<![\d%])%[1-9]\d?(?!\d)                        # %1
    | \$?\{[^\W\d][^{}\n]*\} | \{\d*(?:[:!][^{}\s]*)?\} # ${name}, {name}, {}, {0:d}
    | \$[^\W\d]\w*                                     # $name
    | </?[A-Za-z][^<>]*>                               # <b>
    | &(?:[A-Za-z]\w*|\#\d+|\#[xX][0-9a-fA-F]+);       # &amp;
    """,
    re.VERBOSE,
)
_TAG_NAME = re.compile(r"</?[A-Za-z][\w:-]*")

# scripts that are written without spaces: Thai, Lao, Khmer, Myanmar, Japanese, Chinese
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED_SIGN = re.compile(f"[{_UNSPACED}]")
# marks that belong to the letter before them and are no letters to `re`: accents, Semitic and Indic vowels
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u0963\u0981-\u0d83"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\W\d_]|[{_MARKS}])+")


def placeholders(text: str) -> Counter[str]:
    """Return what a program fills in or a browser reads, and how often: `%s`, `{name}`, `<b>`, `&amp;`.

    Of a tag only its name counts, since its attributes may hold text that is translated.
    """
    found: Counter[str] = Counter()
    for match in _PLACEHOLDER.finditer(text):
        tag = _TAG_NAME.match(match[0])
        found[tag[0].lower() + ">" if tag else match[0]] += 1
    return found


def without_placeholders(text: str, instead: str = " ") -> str:
    """Return the text with each placeholder replaced."""
    return _PLACEHOLDER.sub(instead, text)


def protected(text: str) -> str:
    """Return the text with each placeholder blanked out, so that all other signs keep their places."""
    return _PLACEHOLDER.sub(lambda match: " " * len(match[0]), text)


def count_words(text: str) -> int:
    """Return the number of words between spaces; two signs of a script without spaces count as a word."""
    unspaced = len(_UNSPACED_SIGN.findall(text))
    return max(len(text.split()), (unspaced + 1) // 2)


def count_characters(text: str) -> int:
    """Return the number of characters; a sign of a script without spaces counts as three."""
    return len(text) + 2 * len(_UNSPACED_SIGN.findall(text))


def skeleton(text: str) -> tuple[str, ...]:
    """Return the words in lower case, without placeholders, digits and punctuation.

    A sign of a script without spaces is a word. A text without any letter is its own skeleton, so that lines
    of digits or signs do not all count as the same.
    """
    words = tuple(_WORD.findall(without_placeholders(text).casefold()))
    return words or (text.casefold(),)
