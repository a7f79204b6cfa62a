"""JSON files of strangers: regular files of bounded size and depth, or one sentence."""

import json
from pathlib import Path
from typing import Any

from relpos.translation.errors import ModelFolderError

_DEEPEST = 50  # lists and objects inside each other; those of models have 5
MEBIBYTE = 1 << 20


def read_object(path: Path, most_bytes: int = MEBIBYTE, *, is_deep: bool = False) -> dict[str, Any]:
    """The JSON object in `path`, which holds at most `most_bytes`.

    Raises:
        ModelFolderError: not a regular file, too large, not JSON, not an object, or nested beyond 50
            levels; `is_deep` leaves the last to the parser.
    """
    content = read_bytes(path, most_bytes)
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        # bytes that are no UTF-8, text that is no JSON, numbers of 5,000 digits, 100,000 brackets
        found = None
    if not isinstance(found, dict) or not (is_deep or _is_flat(found)):
        raise ModelFolderError(f"{path}: not a JSON object; the file is damaged.")
    return found


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """What is in `path`.

    Raises:
        ModelFolderError: not a regular file, not readable, or larger than `most_bytes`.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            # read, not asked for: a file of the system may be longer than it says
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read ({error.strerror}).") from error
    if len(content) > most_bytes:
        raise ModelFolderError(f"{path}: more than {most_bytes:,} bytes, which no such file of a model has.")
    return content


def check_regular(path: Path) -> None:
    """Refuse what is missing, and folders, pipes and devices. Raises: ModelFolderError."""
    if path.is_file():
        return
    if path.exists():
        raise ModelFolderError(f"{path}: not a regular file.")
    raise ModelFolderError(f"{path.parent}: the file {path.name} is missing. Copy or train the model again.")


def _is_flat(found: object) -> bool:
    """Whether nothing lies deeper than 50 levels."""
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
