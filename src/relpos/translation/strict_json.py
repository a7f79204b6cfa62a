"""Strict JSON: objects from untrusted regular files, with bounds on size and depth."""

import json
from pathlib import Path
from typing import Any

from relpos.translation.errors import ModelFolderError

_DEEPEST = 50  # nested lists and objects; files of models have 5 levels
MEBIBYTE = 1 << 20


def read_object(path: Path, most_bytes: int = MEBIBYTE, *, is_deep: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path`, which may have at most `most_bytes` bytes.

    Raises:
        ModelFolderError: not a regular file, too large, not a JSON object, or over 50 levels deep; `is_deep`
            lifts the limit on levels to the parser's.
    """
    return parse_object(path, read_bytes(path, most_bytes), is_deep=is_deep)


def parse_object(path: Path, content: bytes, *, is_deep: bool = False) -> dict[str, Any]:
    """The JSON object in `content`, the bytes of the file `path`; see `read_object`."""
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        # not UTF-8, not JSON, a number with 5,000 digits, or 100,000 brackets
        found = None
    if not isinstance(found, dict) or not (is_deep or _is_flat(found)):
        raise ModelFolderError(f"{path}: not a JSON object; the file is damaged.")
    return found


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The bytes of the file `path`.

    Raises:
        ModelFolderError: not a regular file, not readable, or larger than `most_bytes`.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            # the size of a special file may be wrong, so the limit is checked by reading
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read ({error.strerror}).") from error
    if len(content) > most_bytes:
        raise ModelFolderError(f"{path}: must have at most {most_bytes:,} bytes; got more.")
    return content


def check_regular(path: Path) -> None:
    """Refuse a path that is missing, a folder, a pipe or a device. Raises: ModelFolderError."""
    if path.is_file():
        return
    if path.exists():
        raise ModelFolderError(f"{path}: not a regular file.")
    raise ModelFolderError(f"{path.parent}: the file {path.name} is missing. Copy or train the model again.")


def _is_flat(found: object) -> bool:
    """Whether the nesting has at most 50 levels."""
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return True
    return False
