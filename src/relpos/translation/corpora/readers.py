"""Readers of pairs from files: tab-separated lines, two line-aligned files, JSON lines."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from relpos.translation.corpora.text_lines import read_lines
from relpos.translation.errors import InputError
from relpos.translation.text import normal

Pair = tuple[str, str]


def read_tsv(path: Path, columns: tuple[int, int] = (0, 1)) -> Iterator[Pair]:
    """Yield two columns of a tab-separated file; blank lines are skipped, further columns ignored."""
    needed = max(columns) + 1
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) == 1:
            raise InputError(f"{path} line {number} has no tab; each line must be `source TAB target`.")
        if len(cells) < needed:
            raise InputError(
                f"{path} line {number} has {len(cells)} columns and columns {list(columns)}, counted from 0, "
                f"need {needed}; fix the line or choose other columns."
            )
        yield cells[columns[0]], cells[columns[1]]


def read_aligned(source: Path, target: Path) -> Iterator[Pair]:
    """Yield the lines of two files side by side; both must have the same number of lines."""
    lines = zip_longest(read_lines(source), read_lines(target))
    for number, (left, right) in enumerate(lines, start=1):
        if left is None or right is None:
            longer = number + sum(1 for _ in lines)
            counts = (number - 1, longer) if left is None else (longer, number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; "
                "line-aligned files need the same number, so find the line from which they differ."
            )
        yield left, right


def read_jsonl(path: Path, fields: tuple[str, str] = ("source", "target")) -> Iterator[Pair]:
    """Yield two fields of the JSON object on each line; blank lines are skipped.

    Args:
        fields: names of source and target; `translation.en` is the field `en` in the object `translation`.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where} is not JSON: {error.msg} at column {error.colno}; each line must be one object."
            ) from error
        except RecursionError:
            raise InputError(f"{where} is nested too deeply; each line must be one flat object.") from None
        except ValueError:
            # Python parses at most 4,300 digits
            raise InputError(f"{where} has a number with too many digits; shorten it, or quote it.") from None
        if not isinstance(record, dict):
            raise InputError(f"{where} must be a JSON object; got {_json_kind(record)}.")
        yield pick(record, fields[0], where), pick(record, fields[1], where)


def pick(record: Mapping[str, Any], field: str, where: str) -> str:
    """The normalised text of a field, given by its name or a dotted path.

    Raises:
        InputError: there is no such field (the message has the nearest name), it is not text, or it contains
            half of a surrogate pair.
    """
    value = record[field] if field in record else _descend(record, field, where)
    if not isinstance(value, str):
        raise InputError(
            f"{where}: field {field!r} must be text; got {_json_kind(value)}. Choose another field."
        )
    return normal(value, f"{where}: field {field!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, or the first ten."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; the nearest is {near[0]!r}"
    return f"; it has {', '.join(known[:10])}" if known else "; it is empty"


def _descend(record: Mapping[str, Any], field: str, where: str) -> Any:
    value: Any = record
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise InputError(
                f"{where} has no field {field!r}{nearest(field, _names(record))}. "
                "Name the two fields, for example fields: [en, de] in a recipe, or --fields en,de."
            )
        value = value[part]
    return value


def _names(record: Mapping[str, Any], prefix: str = "", levels: int = 5) -> Iterator[str]:
    for name, value in record.items():
        yield prefix + name
        if isinstance(value, Mapping) and levels > 1:
            yield from _names(value, f"{prefix}{name}.", levels - 1)


def _json_kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
