"""Pairs of English and another language from one gettext catalog (.po or .mo)."""

import re
from collections.abc import Iterator
from pathlib import Path

import polib

from relpos.translation.corpora.placeholders import blank_placeholders
from relpos.translation.corpora.readers import Pair
from relpos.translation.corpora.text_lines import MAX_LINE_BYTES
from relpos.translation.corpora.words import count_characters
from relpos.translation.errors import InputError

# Zope's tools give messages a symbolic id and write the English text into a comment; \" stands for a quote
_DEFAULT = re.compile(r'Default:\s*"((?:[^"\\]|\\.)*)"((?:\s*"(?:[^"\\]|\\.)*")*)', re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SYMBOLIC = re.compile(r"[a-z0-9]+(?:[_.:-][A-Za-z0-9]+)*_[A-Za-z0-9_.:-]+")
# names of pages, such as Editing_dates; words with an accelerator mark inside look the same
_JOINED_WORDS = re.compile(r"[^\s_]+(?:_[^\s_]+)+")

# bytes of a catalog; the largest in use have a tenth of it
_MAX_BYTES = 64 << 20

_BLANK_LINE = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[^\W\d_]{2}[.!?])\s+(?=[\"\u201c\u201e(]?[^\W\d_])")
# characters added to the shorter part before comparing, since the lengths of short texts differ most
_SLACK = 15

# accelerator marks, before the letter that a key press selects: _File in GTK, &File in Qt
_MARKS = "_&"
# languages without Latin letters append the key in brackets
_APPENDED_MARK = re.compile(r"\s*\([_&]\w\)")
# a catalog uses a mark if more than this share of its English messages with one mark also have one in the
# translation
_USES_MARKS = 0.5


def read_messages(path: Path) -> list[Pair]:
    """The translated messages as (English, translation), without accelerator marks.

    The header is skipped, and so are messages that are fuzzy, obsolete, untranslated, known by a symbolic id
    only, or names with underscores for spaces. If the language has two plural forms, both are used. The lines
    of a paragraph are joined. Paragraphs and sentences become pairs of their own if both sides have the same
    number of them and each pair matches in length and end.

    Raises:
        InputError: the file is not a catalog.
    """
    pairs = [pair for entry in _entries(path) for pair in _forms(entry)]
    pairs = [pair for pair in pairs if not _is_joined_words(*pair)]
    marks = [mark for mark in _MARKS if _uses_mark(pairs, mark)]
    return [part for pair in pairs for part in _parts(*_strip_marks(pair, marks))]


def _check_size(path: Path) -> None:
    """Refuse a catalog that is too large for polib, which reads whole files into memory."""
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"{path} has more than {_MAX_BYTES:,} bytes; remove this catalog.")
    if path.suffix == ".mo":
        return
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path}: line {number} has more than {MAX_LINE_BYTES:,} bytes; remove this catalog."
                )


def _entries(path: Path) -> Iterator[polib.POEntry | polib.MOEntry]:
    try:
        _check_size(path)
        catalog = polib.mofile(str(path)) if path.suffix == ".mo" else polib.pofile(str(path))
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a gettext catalog ({error}); install its package again.") from error
    for entry in catalog:
        is_doubtful = "fuzzy" in getattr(entry, "flags", ()) or entry.obsolete
        if entry.msgid and not is_doubtful:
            yield entry


def _forms(entry: polib.POEntry | polib.MOEntry) -> Iterator[Pair]:
    english = _english(entry)
    if english is None:
        return
    if not entry.msgid_plural:
        forms = [(english, entry.msgstr)]
    elif len(entry.msgstr_plural) == 2:
        forms = [(english, entry.msgstr_plural[0]), (entry.msgid_plural, entry.msgstr_plural[1])]
    else:
        # with one form, or more than two, the match with the English forms depends on the language
        forms = []
    yield from ((left, right) for left, right in forms if left.strip() and right.strip())


def _english(entry: polib.POEntry | polib.MOEntry) -> str | None:
    default = _DEFAULT.search(getattr(entry, "comment", "") or "")
    if default:
        parts = [default[1], *_QUOTED.findall(default[2])]
        return _ESCAPE.sub(lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), "".join(parts))
    return None if _SYMBOLIC.fullmatch(entry.msgid) else entry.msgid


def _is_joined_words(english: str, translation: str) -> bool:
    if not _JOINED_WORDS.fullmatch(english.strip()):
        return False
    return english.count("_") > 1 or bool(_JOINED_WORDS.fullmatch(translation.strip()))


def _parts(english: str, translation: str) -> Iterator[Pair]:
    """Split a message into paragraphs and these into sentences, as far as the two sides match."""
    for left, right in _split(english, translation, _BLANK_LINE):
        # line breaks inside a paragraph have no meaning
        yield from _split(" ".join(left.split()), " ".join(right.split()), _SENTENCE_END)


def _split(english: str, translation: str, border: re.Pattern[str]) -> list[Pair]:
    left, right = (border.split(text.strip()) for text in (english, translation))
    pairs = list(zip(left, right, strict=False))
    do_match = len(left) == len(right) and all(_do_match(*pair) for pair in pairs)
    return pairs if do_match else [(english, translation)]


def _do_match(english: str, translation: str) -> bool:
    """Whether two parts can be translations of each other: they end alike, and neither is twice as long."""
    shorter, longer = sorted((count_characters(english), count_characters(translation)))
    is_end_equal = english[-1:] in ".!?:" or translation[-1:] in ".!?:"
    return longer <= 2 * shorter + _SLACK and (not is_end_equal or english[-1:] == translation[-1:])


def _uses_mark(pairs: list[Pair], mark: str) -> bool:
    marked = [pair for pair in pairs if len(_marked_letters(pair[0], mark)) == 1]
    both = sum(len(_marked_letters(pair[1], mark)) == 1 for pair in marked)
    return both > _USES_MARKS * len(marked)


def _strip_marks(pair: Pair, marks: list[str]) -> Pair:
    """Remove the mark from both sides, even if only one has it; keep it in names such as file_name."""
    for mark in marks:
        names = re.findall(rf"\w+{mark}\w+", blank_placeholders(pair[0]))
        is_name = any(re.search(rf"\b{re.escape(name)}\b", pair[1]) for name in names)
        if not is_name and all(len(_marked_letters(text, mark)) <= 1 for text in pair):
            pair = _strip_mark(pair[0], mark), _strip_mark(pair[1], mark)
    return pair


def _strip_mark(text: str, mark: str) -> str:
    text = _APPENDED_MARK.sub("", text)
    for place in _marked_letters(text, mark):
        text = text[:place] + text[place + 1 :]
    return text


def _marked_letters(text: str, mark: str) -> list[int]:
    """Positions of a mark before a letter or digit, outside placeholders."""
    plain = blank_placeholders(text)
    pattern = re.compile(rf"(?<!{mark}){mark}(?=[^\W_])")
    return [match.start() for match in pattern.finditer(plain)]
