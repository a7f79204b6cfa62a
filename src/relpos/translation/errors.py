"""What ends a command early; the command line prints each as one line, without a traceback."""

from pathlib import Path


class InputError(Exception):
    """What the user gave cannot be used. The message is one sentence: what, where, and what to do."""


class ModelFolderError(InputError, ValueError):
    """A file in a model's folder cannot be used; a ValueError for callers of transformers' Auto classes."""


class RelposWarning(UserWarning):
    """What the user should know, though the work goes on; a command prints it as one line."""


class UsageError(InputError):
    """An option or a recipe is wrong, before any work has begun."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Training was asked to stop by `signal`; what it had done is in `checkpoint`, if there is one."""

    def __init__(self, signal: int, checkpoint: Path | None) -> None:
        super().__init__(signal, checkpoint)
        self.signal, self.checkpoint = signal, checkpoint


def first_line(error: BaseException) -> str:
    """What another library says went wrong, fit for one line of ours; without words, the kind of error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
