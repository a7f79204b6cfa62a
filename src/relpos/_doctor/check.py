"""A check of the doctor: its result, the problems it reports, and a runner that catches its errors."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

# a space at which lines are not wrapped
NO_BREAK = "\u00a0"


class Result(NamedTuple):
    """The result of one check: `value` for programs, as JSON, and `text` for people."""

    value: dict[str, Any]
    text: str


class Problem(NamedTuple):
    """A problem, and advice on how to solve it."""

    problem: str
    advice: str


Warn = Callable[[str, str], None]
Check = Callable[[Warn], Result]


def run_check(name: str, check: Check, problems: list[Problem]) -> Result:
    """Run `check` and append its problems, its warnings and its exception, if any, to `problems`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", category)
        try:
            result = check(lambda problem, advice: problems.append(Problem(problem, advice)))
        # a broken check must not stop the others
        except Exception as error:
            reason = _short(f"{type(error).__name__}: {error}")
            problems.append(Problem(f"The check of {name} failed.", "Report this output as a bug."))
            result = Result({"error": reason}, f"check failed ({reason})")
    for warning in caught:
        problems.append(Problem(f"Warning: {_short(warning.message)}", "Fix its cause."))
    return result


def _short(message: object) -> str:
    """On one line, at most 300 characters."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else line[:297] + "..."
