"""Placeholder detection: format fields, variables, tags and entities in a text."""

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


def placeholders(text: str) -> Counter[str]:
    """Each placeholder in the text and how often it occurs: `%s`, `{name}`, `<b>`, `&amp;`.

    Of a tag only its name counts, since its attributes may hold text that is translated.
    """
    found: Counter[str] = Counter()
    for match in _PLACEHOLDER.finditer(text):
        tag = _TAG_NAME.match(match[0])
        found[tag[0].lower() + ">" if tag else match[0]] += 1
    return found


def without_placeholders(text: str, replacement: str = " ") -> str:
    """The text with each placeholder replaced."""
    return _PLACEHOLDER.sub(replacement, text)


def blank_placeholders(text: str) -> str:
    """The text with spaces in place of each placeholder; all other characters keep their positions."""
    return _PLACEHOLDER.sub(lambda match: " " * len(match[0]), text)
