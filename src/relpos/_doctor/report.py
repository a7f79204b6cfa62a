"""The report: the results of all checks, as JSON or as text."""

import json
import shutil
import sys
import textwrap
from typing import NamedTuple

from relpos._doctor.backends import COMMON, attention_checks
from relpos._doctor.check import NO_BREAK, Check, Problem, Result, run_check
from relpos._doctor.kernels import kernel_checks
from relpos._doctor.machine import devices, machine_checks
from relpos._doctor.openmp import check_waiting
from relpos._doctor.packages import package_checks, version_checks


class Report(NamedTuple):
    """Results by section and check, and the problems that were found."""

    sections: dict[str, dict[str, Result]]
    problems: list[Problem]

    def to_json(self) -> str:
        """One object: an object for each section, and the list `problems`."""
        values = {
            section: {name: result.value for name, result in results.items()}
            for section, results in self.sections.items()
        }
        return json.dumps({**values, "problems": [problem._asdict() for problem in self.problems]})

    def to_text(self, width: int) -> str:
        """The sections in order, wrapped to `width` characters where words allow."""
        blocks = [_section(title, results, width) for title, results in self.sections.items()]
        return "\n\n".join([*blocks, _advice(self.problems, width)])


def examine() -> Report:
    """Run all checks. None raises: an error becomes its result."""
    problems: list[Problem] = []
    names = run_check("devices", devices, problems).value.get("names", ["cpu"])
    sections: dict[str, dict[str, Check]] = {
        "versions": version_checks(),
        "packages": package_checks(),
        "machine": {**machine_checks(), "waiting": check_waiting},
        "compiled": kernel_checks(),
        "attention": attention_checks(names),
    }
    results = {
        title: {name: run_check(name, check, problems) for name, check in checks.items()}
        for title, checks in sections.items()
    }
    # two checks may meet the same warning
    return Report(results, list(dict.fromkeys(problems)))


def write_report(*, as_json: bool) -> None:
    """Print the report on standard output."""
    report = examine()
    if as_json:
        print(report.to_json(), flush=True)
        return
    text = report.to_text(max(40, min(shutil.get_terminal_size().columns, 100)))
    # a path may have characters that the terminal cannot show
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _section(title: str, results: dict[str, Result], width: int) -> str:
    lines = [title]
    if title == "attention":
        lines += _wrapped(f"Unless a case says otherwise: {COMMON}.", "  ", width)
    column = 2 + max((len(name) for name in results), default=0) + 2
    for name, result in results.items():
        label = f"  {name}".ljust(column)
        for line in result.text.splitlines():
            lines += _wrapped(line, label, width)
            label = " " * column
    return "\n".join(lines)


def _advice(problems: list[Problem], width: int) -> str:
    lines = ["advice"]
    if not problems:
        lines.append("  No problem found.")
    for problem in problems:
        lines += _wrapped(problem.problem, "  - ", width)
        lines += _wrapped(problem.advice, "    ", width)
    return "\n".join(lines)


def _wrapped(line: str, label: str, width: int) -> list[str]:
    """`line` after `label`, wrapped at spaces but not at NO_BREAK; an indented line continues two deeper."""
    text = line.lstrip(" ")
    depth = len(line) - len(text)
    wrapped = textwrap.wrap(
        text,
        width,
        initial_indent=label + " " * depth,
        subsequent_indent=" " * (len(label) + depth + (2 if depth else 0)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(NO_BREAK, " ") for part in wrapped] or [""]
