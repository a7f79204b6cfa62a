"""The one form of text that models read and write, on every way in.

The same rules stand in the tokenizers that relpos saves, so that plain transformers follow them too.
"""

import re
import unicodedata

from tokenizers import Regex, normalizers

from relpos.translation.errors import InputError

# what Python's `str.split` splits at
_SPACES = r"\t-\r\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"

# signs of control, soft hyphens, zero-width spaces and joiners of words, byte-order marks, and code points
# that Unicode keeps free for ever. Joiners of letters (U+200C, U+200D), signs of direction and variation
# selectors change how a text is read, and stay
_DROPPED = r"[\x{0}-\x{8}\x{e}-\x{1b}\x{7f}-\x{84}\x{86}-\x{9f}\x{ad}\x{200b}\x{2060}\x{feff}]|\p{NChar}"

NORMALIZER = normalizers.Sequence(
    [
        normalizers.Replace(Regex(_DROPPED), ""),
        normalizers.NFC(),
        normalizers.Replace(Regex(f"[{_SPACES}]+"), " "),
        normalizers.Strip(),
        # of a text in which nothing can be seen, nothing is left
        normalizers.Replace(Regex(r"\A[\p{DI} ]+\z"), ""),
    ]
)

_ASCII = re.compile(r"[!-~]")


class TextError(InputError, ValueError):
    """A text holds what no text can. In a command it is one line, without a traceback."""


def normal(text: str, where: str = "the text") -> str:
    """The text in Unicode's form C, words with single spaces, without invisible signs that mean nothing.

    Normalising twice is normalising once. A text in which nothing can be seen becomes empty.

    Args:
        where: begins the message of an error, for example "line 3".
    Raises:
        TextError: it holds half of a surrogate pair.
        TypeError: it is no str.
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
            f"{error.start + 1}; it is no text in Unicode: decode it anew, or take the character out."
        ) from None


def _is_plain(text: str) -> bool:
    """Whether `text` is surely normal already, as most text is: 20 times faster than normalising it."""
    return (
        text.isprintable()  # no white space but U+0020, nothing that is dropped
        and _ASCII.search(text) is not None
        and "  " not in text
        and not text.startswith(" ")
        and not text.endswith(" ")
        and unicodedata.is_normalized("NFC", text)
    )
