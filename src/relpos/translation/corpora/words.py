"""Word and character counts, and a key that ignores case, digits, punctuation and placeholders.

Scripts without spaces (Chinese, Japanese, Thai, ...) are counted by their characters.
"""

import re

from relpos.translation.corpora.placeholders import without_placeholders

# scripts that are written without spaces: Thai, Lao, Khmer, Myanmar, Japanese, Chinese
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
# combining marks that `re` does not count as letters: accents, Semitic and Indic vowels
_COMBINING = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u0963\u0981-\u0d83"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\W\d_]|[{_COMBINING}])+")


def count_words(text: str) -> int:
    """The number of words between spaces; two characters of a script without spaces count as a word."""
    unspaced = len(_UNSPACED_CHARACTER.findall(text))
    return max(len(text.split()), (unspaced + 1) // 2)


def count_characters(text: str) -> int:
    """The number of characters; a character of a script without spaces counts as three."""
    return len(text) + 2 * len(_UNSPACED_CHARACTER.findall(text))


def word_key(text: str) -> tuple[str, ...]:
    """The words in lower case, without placeholders, digits and punctuation.

    A character of a script without spaces is a word. The key of a text without letters is the text itself,
    so that lines of digits or signs are not all equal.
    """
    words = tuple(_WORD.findall(without_placeholders(text).casefold()))
    return words or (text.casefold(),)
