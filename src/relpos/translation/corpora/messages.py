"""The messages of one gettext catalog (.po or .mo) as clean pairs of English and another language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import polib

from relpos.translation.corpora.readers import Pair
from relpos.translation.corpora.skeleton import count_characters, protected
from relpos.translation.corpora.textfile import MAX_LINE_BYTES
from relpos.translation.errors import InputError

# Zope's tools give messages a symbolic id and write the English text into a comment; \" stands for a quote
_DEFAULT = re.compile(r'Default:\s*"((?:[^"\\]|\\.)*)"((?:\s*"(?:[^"\\]|\\.)*")*)', re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SYMBOLIC = re.compile(r"[a-z0-9]+(?:[_.:-][A-Za-z0-9]+)*_[A-Za-z0-9_.:-]+")
# names of pages and the like: Editing_dates. A word with a mark inside looks the same, and goes with them
_JOINED_WORDS = re.compile(r"[^\s_]+(?:_[^\s_]+)+")

# bytes of a catalog; the largest that people write have a tenth of them
_MAX_BYTES = 64 << 20

_BLANK_LINE = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[^\W\d_]{2}[.!?])\s+(?=[\"\u201c\u201e(]?[^\W\d_])")
# characters that the shorter of two parts is granted, since short texts differ most
_SLACK = 15

# a mark before the letter that a key press selects: _File in GTK, &File in Qt
_MARKS = "_&"
# languages without Latin letters put the key in brackets behind the text
_APPENDED_MARK = re.compile(r"\s*\([_&]\w\)")
# among messages with one mark in English, this share must have one in the translation too
_USES_MARKS = 0.5


def read_messages(path: Path) -> list[Pair]:
    """Return the translated messages as (English, translation), without accelerator marks.

    Left out are the header and messages that are fuzzy, obsolete, untranslated, known by a symbolic id alone,
    or names with underscores for spaces.
    Of plural forms both are taken where the language has two. The lines of a paragraph are joined; paragraphs
    and sentences become pairs of their own where both sides have equally many that can belong together.

    Raises:
        InputError: the file is no catalog.
    """
    pairs = [pair for entry in _entries(path) for pair in _forms(entry)]
    pairs = [pair for pair in pairs if not _is_joined_words(*pair)]
    marks = [mark for mark in _MARKS if _uses_mark(pairs, mark)]
    return [part for pair in pairs for part in _parts(*_strip_marks(pair, marks))]


def _check_size(path: Path) -> None:
    """Refuse a catalog that polib would hold for long in much memory: it takes whole files."""
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"{path} has more than {_MAX_BYTES:,} bytes; take this catalog out.")
    if path.suffix == ".mo":
        return
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path}: line {number} has more than {MAX_LINE_BYTES:,} bytes; take this catalog out."
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
        # which of one or of more than two forms answers the English ones depends on the language
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
    """Split a message into paragraphs and these into sentences, as far as the two sides answer each other."""
    for left, right in _split(english, translation, _BLANK_LINE):
        # lines inside a paragraph are broken where there was room
        yield from _split(" ".join(left.split()), " ".join(right.split()), _SENTENCE_END)


def _split(english: str, translation: str, border: re.Pattern[str]) -> list[Pair]:
    left, right = (border.split(text.strip()) for text in (english, translation))
    pairs = list(zip(left, right, strict=False))
    do_answer = len(left) == len(right) and all(_do_answer(*pair) for pair in pairs)
    return pairs if do_answer else [(english, translation)]


def _do_answer(english: str, translation: str) -> bool:
    """Say whether two parts can belong together: they end alike, and neither is twice as long."""
    shorter, longer = sorted((count_characters(english), count_characters(translation)))
    is_end_equal = english[-1:] in ".!?:" or translation[-1:] in ".!?:"
    return longer <= 2 * shorter + _SLACK and (not is_end_equal or english[-1:] == translation[-1:])


def _uses_mark(pairs: list[Pair], mark: str) -> bool:
    marked = [pair for pair in pairs if len(_marked_letters(pair[0], mark)) == 1]
    both = sum(len(_marked_letters(pair[1], mark)) == 1 for pair in marked)
    return both > _USES_MARKS * len(marked)


def _strip_marks(pair: Pair, marks: list[str]) -> Pair:
    """Take the mark off both sides, also where only one has it; names such as file_name stay."""
    for mark in marks:
        names = re.findall(rf"\w+{mark}\w+", protected(pair[0]))
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
    """Return where a mark stands before a letter or digit, placeholders left out."""
    plain = protected(text)
    pattern = re.compile(rf"(?<!{mark}){mark}(?=[^\W_])")
    return [match.start() for match in pattern.finditer(plain)]
