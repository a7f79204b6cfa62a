"""What a probe finds, and how a probe is asked so that none can stop the others."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

# a space at which no line is cut
NO_BREAK = "\u00a0"


class Finding(NamedTuple):
    """What one probe found: `value` for a program, ready for JSON, and `text` for a person."""

    value: dict[str, Any]
    text: str


class Problem(NamedTuple):
    """What is wrong, and what to do about it."""

    problem: str
    advice: str


Complain = Callable[[str, str], None]
Probe = Callable[[Complain], Finding]


def ask(name: str, probe: Probe, problems: list[Problem]) -> Finding:
    """What `probe` finds; a failure is a finding too, and like each warning joins `problems`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", category)
        try:
            found = probe(lambda problem, advice: problems.append(Problem(problem, advice)))
        # whatever it is, the other lines are still worth having
        except Exception as error:
            reason = _short(f"{type(error).__name__}: {error}")
            problems.append(Problem(f"{name} could not be told.", "Report it, with this output."))
            found = Finding({"error": reason}, f"could not be told ({reason})")
    for warning in caught:
        problems.append(Problem(f"a warning: {_short(warning.message)}", "Mend what it names."))
    return found


def _short(message: object) -> str:
    """On one line, at most 300 characters."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else line[:297] + "..."
