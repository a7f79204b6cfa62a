"""Language tags (en, de-AT, sr@latin): normal form, base language, best match among several."""

import re
from collections.abc import Collection

_TAG = re.compile(r"[a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*(?:@\w+)?")


def is_tag(text: str) -> bool:
    """Whether `text` has the form of a language tag."""
    return _TAG.fullmatch(text) is not None


def normalize(tag: str) -> str:
    """The tag in lower case, with underscores: de-AT becomes de_at."""
    return tag.replace("-", "_").lower()


def base_language(tag: str) -> str:
    """The tag without its region, script and variant: de-AT becomes de."""
    return re.split("[_@]", normalize(tag))[0]


def best_match(tag: str, known: Collection[str]) -> str | None:
    """The tag among `known`, all normalized, for `tag`: itself, its base, or the only one of its base."""
    wanted = normalize(tag)
    for candidate in (wanted, base_language(wanted)):
        if candidate in known:
            return candidate
    regional = [other for other in known if base_language(other) == wanted]
    return regional[0] if len(regional) == 1 else None
