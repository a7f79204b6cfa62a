"""Standard streams and files of a command: lines in and out, and warnings and errors as one line each.

Handles streams that the caller has closed: `relpos translate model <&- 2>&-`.
"""

import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from relpos.translation.atomic_files import open_atomic
from relpos.translation.errors import InputError, RelposWarning, UsageError, first_line


def open_closed_streams() -> None:
    """Open a file for each closed standard stream, so that reading or writing it fails.

    Python represents a closed stream by None, and the next opened file would get its descriptor, to which
    other libraries write.
    """
    if sys.stdin is None:
        # opened for writing, so that reading fails with "Bad file descriptor", reported like other errors
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def say(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print relpos's warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        said: set[str] = set()

        def show_line(message: Warning | str, category: type[Warning], *place: Any, **where: Any) -> None:
            if issubclass(category, RelposWarning):
                line = f"relpos: warning: {' '.join(str(message).split())}"
                if line not in said:
                    # a recipe may be read several times
                    said.add(line)
                    say(line)
                if category is not RelposWarning:
                    # once for each category, not for each batch
                    warnings.simplefilter("ignore", category)
            else:
                show(message, category, *place, **where)

        warnings.showwarning = show_line
        warnings.simplefilter("always", RelposWarning)
        yield


def fail(message: str, code: int) -> int:
    """Print an error as one line; returns `code`."""
    drop_unwritten()
    try:
        print(f"relpos: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        # nobody reads it; Python would flush again at exit, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def drop_unwritten() -> None:
    """Discard output that cannot be written; Python would report it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def written(output: Path | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """A function that writes lines to standard output, or to a file that is replaced only on success."""
    with ExitStack() as stack:
        with named(output):
            if output is None:
                sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
                file = sys.stdout
            else:
                file = stack.enter_context(open_atomic(output))

        def write(lines: Iterable[str]) -> None:
            with named(output):
                file.writelines(f"{line}\n" for line in lines)
                file.flush()

        yield write
        with named(output):
            stack.close()


def check_apart(output: Path | None, inputs: list[Path], model: Path) -> None:
    """Refuse to overwrite an input, or a file of the model or of a run. Raises: UsageError."""
    if output is None or not output.is_file():
        return
    for path in inputs:
        if path.is_file() and output.samefile(path):
            raise UsageError(f"{output} is an input, and would be overwritten. Choose another output file.")
    for folder in output.resolve().parents:
        if (folder / "relpos.json").is_file() or folder == model.resolve():
            raise UsageError(
                f"{output} belongs to {folder}, and would be overwritten. Choose another output file."
            )


def read_batches(file: Path | None, max_line_bytes: int, *, is_alone: bool) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input as they arrive, in batches, or one by one."""
    from relpos.translation.corpora import read_arrived

    for lines in read_arrived(sys.stdin.buffer if file is None else file, max_line_bytes, 8192):
        yield from ([line] for line in lines) if is_alone else [lines]


def is_regular(file: Path | None) -> bool:
    """Whether the input is a regular file, which can be read at any time."""
    if file is not None:
        return file.is_file()
    try:
        return stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def one_line(text: str) -> str:
    """A translation as one line; a model may generate line breaks."""
    return " ".join(text.splitlines())


@contextmanager
def named(output: Path | None) -> Iterator[None]:
    """Raise an InputError with the name of the file, or of standard output, if writing fails."""
    try:
        yield
    except OSError as error:
        if output is None and isinstance(error, BrokenPipeError):
            raise
        name = "standard output" if output is None else output
        raise InputError(f"{name}: cannot be written ({error.strerror or first_line(error)}).") from error
