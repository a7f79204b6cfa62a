"""Counts what each backend ran and skipped, and fails the run where one skipped what it must run.

A pytest plugin. A case is a test with a parameter `backend`. A skip must give reasons that
conformance/skips.py lists, and a property may not be skipped at all; with --require-backends each backend
must also have run its share of the cases.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from conformance.skips import LEAST_SHARE, MAY_SKIP
from relpos.backends import BACKENDS


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


TALLY = pytest.StashKey[Tally]()


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
        action="store_true",
        help="fail where a backend ran less than its share of the cases; for runs of the whole suite",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[TALLY] = Tally()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a case when it has run or was skipped, in its set-up or in its body."""
    report = yield
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    if backend is None:
        return report
    tally = item.config.stash[TALLY]
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        # one example that is skipped takes all the others with it
        is_whole = call.when == "call" and _is_property(item)
        whole = "all examples of a property: " if is_whole else ""
        tally.skip(backend, item.nodeid, whole + reason.removeprefix("Skipped: "))
    elif report.when == "call":
        tally.ran[backend] += 1
    return report


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _judge(config: pytest.Config) -> list[str]:
    least = LEAST_SHARE if config.getoption("--require-backends") else 0.0
    return complaints(config.stash[TALLY], [x.name for x in BACKENDS], MAY_SKIP, least)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that skipped what it must not; one that failed already keeps its own status."""
    if session.exitstatus == pytest.ExitCode.OK and _judge(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts, and what is wrong with them."""
    tally = config.stash[TALLY]
    if tally.ran or tally.skipped:
        terminalreporter.write_line(tally.line(x.name for x in BACKENDS))
    for sentence in _judge(config):
        terminalreporter.write_line(sentence, red=True)
