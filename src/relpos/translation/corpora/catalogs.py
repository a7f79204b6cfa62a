"""Pairs from the gettext catalogs of installed Python distributions: parallel text that pip brings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from relpos.translation.corpora.messages import read_messages
from relpos.translation.corpora.readers import Pair
from relpos.translation.errors import InputError

_ENGLISH = "en"
_TAG = re.compile(r"[a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*(?:@\w+)?")
_TOLD = 10


def find_catalogs(distributions: Sequence[str], source_language: str, target_language: str) -> list[Path]:
    """Return the catalog files of installed distributions; one of the languages must be English.

    A language that has no catalog of its own falls back to its base (de-AT to de).

    Raises:
        InputError: no side is English, a distribution is not installed, or it has no catalog of the language.
    """
    is_english = [_base(language) == _ENGLISH for language in (source_language, target_language)]
    if sum(is_english) != 1:
        raise InputError(
            "catalogs hold English and one translation each, so one of the two languages must be en; "
            f"got {source_language} and {target_language}."
        )
    other = source_language if is_english[1] else target_language
    return [path for name in distributions for path in _catalogs_of(name, other)]


def read_catalogs(paths: Sequence[Path], target_language: str) -> Iterator[Pair]:
    """Yield the translated messages of catalogs, English first unless English is the target language."""
    is_swapped = _base(target_language) == _ENGLISH
    for path in paths:
        for english, translation in read_messages(path):
            yield (translation, english) if is_swapped else (english, translation)


def _catalogs_of(distribution: str, language: str) -> list[Path]:
    by_tag: dict[str, list[Path]] = {}
    for path in _files(distribution):
        tag = _language_of(path)
        if tag is not None and path.is_file():
            by_tag.setdefault(_normal(tag), []).append(path)
    if not by_tag:
        raise InputError(f"the distribution {distribution} has no gettext catalogs; name another one.")
    tag = _choose(language, by_tag)
    if tag is None:
        known = sorted(by_tag)
        more = f" and {len(known) - _TOLD} more" if len(known) > _TOLD else ""
        raise InputError(
            f"the distribution {distribution} has no catalog for {language}; "
            f"it has {', '.join(known[:_TOLD])}{more}."
        )
    paths = sorted(set(by_tag[tag]))
    # a .po file knows more than the .mo file made from it: what is fuzzy, and English texts of symbolic ids
    return [path for path in paths if path.suffix == ".po" or path.with_suffix(".po") not in paths]


def _files(distribution: str) -> list[Path]:
    """Return the catalog files of an installed distribution, be it copied or editable."""
    try:
        found = metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise InputError(
            f"the distribution {distribution} is not installed; run `pip install {distribution}`."
        ) from error
    listed = [Path(str(found.locate_file(file))) for file in found.files or []]
    paths = [path.resolve() for path in listed if path.suffix in (".po", ".mo")]
    origin = found.read_text("direct_url.json")
    if origin:
        url = json.loads(origin)
        if url.get("dir_info", {}).get("editable"):
            folder = Path(url2pathname(urlsplit(url["url"]).path))
            paths += [path.resolve() for kind in ("po", "mo") for path in folder.rglob(f"*.{kind}")]
    return paths


def _language_of(path: Path) -> str | None:
    """Return the language tag of <tag>/LC_MESSAGES/<domain>.mo, of <folder>/<tag>.po, or None."""
    tag = path.parent.parent.name if path.parent.name == "LC_MESSAGES" else path.stem
    return tag if _TAG.fullmatch(tag) else None


def _choose(language: str, known: dict[str, list[Path]]) -> str | None:
    """Return the known tag for a language: itself, its base, or the only one with its base."""
    tag = _normal(language)
    for candidate in (tag, _base(tag)):
        if candidate in known:
            return candidate
    regional = [other for other in known if _base(other) == tag]
    return regional[0] if len(regional) == 1 else None


def _normal(tag: str) -> str:
    return tag.replace("-", "_").lower()


def _base(tag: str) -> str:
    return re.split("[_@]", _normal(tag))[0]
