"""The report: every probe asked, and its answers as JSON or as text."""

import json
import shutil
import sys
import textwrap
from typing import NamedTuple

from relpos._doctor.backends import COMMON, attention_probes
from relpos._doctor.check import NO_BREAK, Finding, Probe, Problem, ask
from relpos._doctor.kernels import compiled_probes
from relpos._doctor.machine import devices, machine_probes
from relpos._doctor.openmp import waiting_probes
from relpos._doctor.packages import package_probes, version_probes


class Report(NamedTuple):
    """Findings by section and probe, and what is wrong."""

    sections: dict[str, dict[str, Finding]]
    problems: list[Problem]

    def to_json(self) -> str:
        """One object: an object for each section, and the list `problems`."""
        values = {
            section: {name: finding.value for name, finding in findings.items()}
            for section, findings in self.sections.items()
        }
        return json.dumps({**values, "problems": [problem._asdict() for problem in self.problems]})

    def to_text(self, width: int) -> str:
        """Sections one below the other, lines of at most `width` characters where words allow."""
        blocks = [_section(title, findings, width) for title, findings in self.sections.items()]
        return "\n\n".join([*blocks, _advice(self.problems, width)])


def examine() -> Report:
    """Ask every probe. None can fail: what it cannot tell is its answer."""
    problems: list[Problem] = []
    names = ask("devices", devices, problems).value.get("names", ["cpu"])
    sections: dict[str, dict[str, Probe]] = {
        "versions": version_probes(),
        "packages": package_probes(),
        "machine": {**machine_probes(), **waiting_probes()},
        "compiled": compiled_probes(),
        "attention": attention_probes(names),
    }
    findings = {
        title: {name: ask(name, probe, problems) for name, probe in probes.items()}
        for title, probes in sections.items()
    }
    # two probes may meet the same warning
    return Report(findings, list(dict.fromkeys(problems)))


def write_report(*, as_json: bool) -> None:
    """Print the report on standard output."""
    report = examine()
    if as_json:
        print(report.to_json(), flush=True)
        return
    text = report.to_text(max(40, min(shutil.get_terminal_size().columns, 100)))
    # a path may hold what the terminal cannot show
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _section(title: str, findings: dict[str, Finding], width: int) -> str:
    lines = [title]
    if title == "attention":
        lines += _wrapped(f"Unless a case says otherwise: {COMMON}.", "  ", width)
    column = 2 + max((len(name) for name in findings), default=0) + 2
    for name, finding in findings.items():
        label = f"  {name}".ljust(column)
        for line in finding.text.splitlines():
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
    """`line` after `label`, cut at spaces but not at NO_BREAK; what is indented goes on two deeper."""
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
