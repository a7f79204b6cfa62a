"""Parallel text from the gettext catalogs of installed Python distributions."""

import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from relpos.translation.corpora.language_tags import base_language, best_match, is_tag, normalize
from relpos.translation.corpora.messages import read_messages
from relpos.translation.corpora.readers import Pair
from relpos.translation.errors import InputError, list_names

_ENGLISH = "en"


def find_catalogs(distributions: Sequence[str], source_language: str, target_language: str) -> list[Path]:
    """The catalog files of installed distributions; one of the languages must be English.

    A language that has no catalog of its own falls back to its base (de-AT to de).

    Raises:
        InputError: no side is English, a distribution is not installed, or it has no catalog of the language.
    """
    is_english = [base_language(language) == _ENGLISH for language in (source_language, target_language)]
    if sum(is_english) != 1:
        raise InputError(
            "catalogs hold English and one translation each, so one of the two languages must be en; "
            f"got {source_language} and {target_language}."
        )
    other = source_language if is_english[1] else target_language
    return [path for name in distributions for path in _catalogs_of(name, other)]


def read_catalogs(paths: Sequence[Path], target_language: str) -> Iterator[Pair]:
    """Yield the translated messages of catalogs, English first unless English is the target language."""
    is_swapped = base_language(target_language) == _ENGLISH
    for path in paths:
        for english, translation in read_messages(path):
            yield (translation, english) if is_swapped else (english, translation)


def _catalogs_of(distribution: str, language: str) -> list[Path]:
    by_tag: dict[str, list[Path]] = {}
    for path in _files(distribution):
        tag = _language_of(path)
        if tag is not None and path.is_file():
            by_tag.setdefault(normalize(tag), []).append(path)
    if not by_tag:
        raise InputError(f"the distribution {distribution} has no gettext catalogs; name another one.")
    tag = best_match(language, by_tag)
    if tag is None:
        raise InputError(
            f"the distribution {distribution} has no catalog for {language}; "
            f"it has {list_names(sorted(by_tag), 10)}."
        )
    paths = sorted(set(by_tag[tag]))
    # a .po file has more than the .mo file made from it: fuzzy flags, and English texts of symbolic ids
    return [path for path in paths if path.suffix == ".po" or path.with_suffix(".po") not in paths]


def _files(distribution: str) -> list[Path]:
    """The catalog files of an installed distribution, editable or not."""
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
    """The language tag in <tag>/LC_MESSAGES/<domain>.mo or <folder>/<tag>.po, or None."""
    tag = path.parent.parent.name if path.parent.name == "LC_MESSAGES" else path.stem
    return tag if is_tag(tag) else None
