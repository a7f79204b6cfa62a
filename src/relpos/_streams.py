"""Standard streams and files of a command: lines out, warnings and failures in one line each.

Also streams that the caller has closed: `relpos translate model <&- 2>&-`.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from relpos.translation.atomic_files import open_atomic
from relpos.translation.errors import InputError, RelposWarning, UsageError, first_line


def open_closed_streams() -> None:
    """Give each closed standard stream a file: reading and writing fail there, what is said is lost.

    Without one Python has None in its place, and the next file to be opened gets its number, which other
    libraries write to.
    """
    if sys.stdin is None:
        # opened the wrong way: that fails with "Bad file descriptor", and is told as any failure is
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print our own warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        said: set[str] = set()

        def show_line(message: Warning | str, category: type[Warning], *place: Any, **where: Any) -> None:
            if issubclass(category, RelposWarning):
                line = f"relpos: warning: {' '.join(str(message).split())}"
                if line not in said:
                    # one recipe may be read several times
                    said.add(line)
                    say(line)
                if category is not RelposWarning:
                    # one of a kind, and not one for each batch
                    warnings.simplefilter("ignore", category)
            else:
                show(message, category, *place, **where)

        warnings.showwarning = show_line
        warnings.simplefilter("always", RelposWarning)
        yield


def fail(message: str, code: int) -> int:
    drop_unwritten()
    try:
        print(f"relpos: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        # nobody reads it; Python would try once more at exit, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def drop_unwritten() -> None:
    """Forget what standard output does not take; Python would complain of it once more at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def written(output: Path | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """What writes lines to a file, which appears whole or not at all, or to standard output."""
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
    """Refuse to write over what is read, or over a file of the model or of a run."""
    if output is None or not output.is_file():
        return
    for path in inputs:
        if path.is_file() and output.samefile(path):
            raise UsageError(
                f"{output} is what is read, and would be replaced. Choose another file to write."
            )
    for folder in output.resolve().parents:
        if (folder / "relpos.json").is_file() or folder == model.resolve():
            raise UsageError(
                f"{output} belongs to {folder}, and would be replaced. Choose another file to write."
            )


def one_line(text: str) -> str:
    """A translation as a line; a model may put line breaks in it."""
    return " ".join(text.splitlines())


@contextmanager
def named(output: Path | None) -> Iterator[None]:
    """Say of a file, or of standard output, that it cannot be written."""
    try:
        yield
    except OSError as error:
        if output is None and isinstance(error, BrokenPipeError):
            raise
        name = "standard output" if output is None else output
        raise InputError(f"{name}: cannot be written ({error.strerror or first_line(error)}).") from error
