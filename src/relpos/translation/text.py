"""Text normalisation, applied to all text that models read and write.

The tokenizers that relpos saves contain the same rules, so transformers applies them too.
"""

import re
import unicodedata

from tokenizers import Regex, normalizers

from relpos.translation.errors import InputError

# the characters that Python's `str.split` splits at
_SPACES = r"\t-\r\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"

# control characters, soft hyphens, zero-width spaces, word joiners, byte-order marks and noncharacters.
# Letter joiners (U+200C, U+200D), direction marks and variation selectors change how a text reads, and stay
_DROPPED = r"[\x{0}-\x{8}\x{e}-\x{1b}\x{7f}-\x{84}\x{86}-\x{9f}\x{ad}\x{200b}\x{2060}\x{feff}]|\p{NChar}"

NORMALIZER = normalizers.Sequence(
    [
        normalizers.Replace(Regex(_DROPPED), ""),
        normalizers.NFC(),
        normalizers.Replace(Regex(f"[{_SPACES}]+"), " "),
        normalizers.Strip(),
        # a text without a visible character becomes empty
        normalizers.Replace(Regex(r"\A[\p{DI} ]+\z"), ""),
    ]
)

_ASCII = re.compile(r"[!-~]")


class TextError(InputError, ValueError):
    """A text is not valid Unicode. A command prints it as one line, without a traceback."""


def normal(text: str, where: str = "the text") -> str:
    """The text in Unicode form C, with single spaces between words, without meaningless invisible characters.

    The function is idempotent. A text without a visible character becomes empty.

    Args:
        where: name of the text in error messages, for example "line 3".
    Raises:
        TextError: the text contains half of a surrogate pair.
        TypeError: the text is not a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"{where} must be a str; got {type(text).__name__}.")
    if _is_plain(text):
        return text
    try:
        return NORMALIZER.normalize_str(text)
    except UnicodeEncodeError as error:
        raise TextError(
            f"{where} has half of a surrogate pair, U+{ord(text[error.start]):04X}, as character "
            f"{error.start + 1}; decode the text again, or remove the character."
        ) from None


def _is_plain(text: str) -> bool:
    """Whether `text` is certainly normalised, as most text is; 20 times faster than normalising it."""
    return (
        text.isprintable()  # no white space other than U+0020, and no dropped character
        and _ASCII.search(text) is not None
        and "  " not in text
        and not text.startswith(" ")
        and not text.endswith(" ")
        and unicodedata.is_normalized("NFC", text)
    )
