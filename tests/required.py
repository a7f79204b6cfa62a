"""Counts what each backend ran and skipped, and fails the run where one skipped what it must run.

A pytest plugin. A case is a test with a parameter `backend`. A skip must give reasons that
conformance/skips.py lists, and a property may not be skipped at all; each backend that
--require-backends names must also have run its share of the cases.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from conformance.skips import LEAST_SHARE, MAY_SKIP
from relpos.backends import BACKENDS

# the property of a report that holds (backend, is_property)
CASE_OF = "case of"


@dataclass
class Tally:
    """Cases of each backend: how many ran, and which were skipped with what was said."""

    ran: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # backend -> (case, reason)

    def skip(self, backend: str, case: str, reason: str) -> None:
        """Count a case that was skipped."""
        self.skipped.setdefault(backend, []).append((case, reason))

    def line(self, backends: Iterable[str]) -> str:
        """What is printed at the end of a run."""
        counts = [f"{x} {self.ran[x]} run, {len(self.skipped.get(x, []))} skipped" for x in backends]
        return "conformance: " + "; ".join(counts)


def complaints(
    tally: Tally, backends: Iterable[str], may_skip: Mapping[str, tuple[str, ...]], least_share: float
) -> list[str]:
    """A sentence for each skip that is not listed, and for each backend that ran too small a share."""
    found = []
    for backend in backends:
        skipped = tally.skipped.get(backend, [])
        for case, reason in skipped:
            if not _is_listed(reason, backend, may_skip.get(backend, ())):
                found.append(f"{case} must run or be skipped for a listed reason; got {reason!r}.")
        total = tally.ran[backend] + len(skipped)
        if tally.ran[backend] < least_share * max(total, 1):
            ran = f"ran {tally.ran[backend]} of {total}"
            found.append(f"{backend} must run at least {least_share:.0%} of its cases; {ran}.")
    return found


def _is_listed(reason: str, backend: str, beginnings: tuple[str, ...]) -> bool:
    """Whether "backend: one; another" names that backend, and each of its reasons is a listed one."""
    named, separator, reasons = reason.partition(": ")
    return bool(separator) and named == backend and all(x.startswith(beginnings) for x in reasons.split("; "))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take --require-backends."""
    parser.addoption(
        "--require-backends",
        type=lambda names: names.split(","),
        default=[],
        metavar="NAME[,NAME...]",
        help="fail if one of these backends ran less than its share of the cases; for whole runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count, unless this is one of several processes that report to another."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counting(config.getoption("--require-backends")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say in the report of a case which backend it is of, and whether it is a property."""
    report = yield
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    if backend is not None:
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        report.user_properties.append((CASE_OF, (backend, is_property)))
    return report


class Counting:
    """Counts reports of cases, whichever process ran them, and judges the run at its end."""

    def __init__(self, required: list[str]) -> None:
        self._tally = Tally()
        self._required = required

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case when it has run or was skipped, in its set-up or in its body."""
        backend, is_property = dict(report.user_properties).get(CASE_OF, (None, False))
        if backend is None:
            return
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            # one example that is skipped takes all the others with it
            whole = "all examples of a property: " if is_property and report.when == "call" else ""
            self._tally.skip(backend, report.nodeid, whole + reason.removeprefix("Skipped: "))
        elif report.when == "call":
            self._tally.ran[backend] += 1

    def _judge(self) -> list[str]:
        others = [x.name for x in BACKENDS if x.name not in self._required]
        found = complaints(self._tally, self._required, MAY_SKIP, LEAST_SHARE)
        return found + complaints(self._tally, others, MAY_SKIP, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that skipped what it must not; one that failed already keeps its own status."""
        if session.exitstatus == pytest.ExitCode.OK and self._judge():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the counts, and what is wrong with them."""
        if self._tally.ran or self._tally.skipped:
            terminalreporter.write_line(self._tally.line(x.name for x in BACKENDS))
        for sentence in self._judge():
            terminalreporter.write_line(sentence, red=True)
