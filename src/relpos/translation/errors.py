"""Exceptions and warnings, which the command prints as one line each, and parts of their messages."""

from collections.abc import Sequence
from pathlib import Path


class InputError(Exception):
    """Input that cannot be used. The message is one sentence: what is wrong, where, and what to do."""


class ModelFolderError(InputError, ValueError):
    """A file in a model's folder cannot be used; a ValueError for callers of transformers' Auto classes."""


class RelposWarning(UserWarning):
    """A warning for the user; a command prints it as one line and continues."""


class UsageError(InputError):
    """An option or a recipe is wrong; raised before any work begins."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """Training was stopped by `signal`; `checkpoint` has its state, or is None."""

    def __init__(self, signal: int, checkpoint: Path | None) -> None:
        super().__init__(signal, checkpoint)
        self.signal, self.checkpoint = signal, checkpoint


def first_line(error: BaseException) -> str:
    """The first line of another library's message, at most 200 characters; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def list_names(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and the number of the others; unprintable names are quoted, long ones cut."""
    shown = [name[:200] if name.isprintable() else repr(name[:200]) for name in names[:most]]
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown) + rest
