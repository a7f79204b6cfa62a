"""A plugin of pytest that writes what each test did: a line of JSON for its outcome and its assertions.

    test, outcome   the test's name; passed, failed or skipped
    module          the module that defines it
    reason          why it failed or was skipped, in one line
    assertions      assertions that held: assert statements, assert... of unittest, torch and numpy
    calls           calls of a module's forward and of generate, save_pretrained, from_pretrained, backward

Calls are counted only of a test that ran through without an assertion: it runs once more, under a profiler.
The run that decides the outcome is not disturbed.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch

CALLS = ("forward", "generate", "save_pretrained", "from_pretrained", "backward")
counts = {"assertions": 0, "calls": 0}
records: dict[str, dict[str, Any]] = {}


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls count as assertions."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        counts["assertions"] += 1
        return function(*arguments, **options)

    call.is_counted = True  # type: ignore[attr-defined]
    return call


def count_assertions_of(owner: Any) -> None:
    """Count the calls of every function of a module or class whose name begins with assert."""
    for name, function in list(vars(owner).items()):
        is_function = callable(function) and not isinstance(function, type)
        if name.startswith("assert") and is_function and not hasattr(function, "is_counted"):
            setattr(owner, name, counted(function))


def pytest_configure(config: pytest.Config) -> None:
    """Have assert statements counted in the suites' own modules, before they are imported."""
    pytest.register_assert_rewrite("tests.test_modeling_common", "tests.generation.test_utils")
    for module in (torch.testing, numpy.testing):
        count_assertions_of(module)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin the records, and count the assertions of all classes."""
    for owner in {base for item in items if item.cls for base in item.cls.__mro__}:
        count_assertions_of(owner)
    for item in items:
        records[short_name(item.nodeid)] = {"module": module_of(item), "assertions": 0, "calls": 0}


def module_of(item: pytest.Item) -> str:
    """The module of the class, among an item's bases, that defines the test."""
    owners = [base.__module__ for base in item.cls.__mro__ if item.name in vars(base)] if item.cls else []
    return owners[-1] if owners else ""


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    """Count an assert statement that held."""
    counts["assertions"] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count from zero while the test's body runs."""
    counts.update(assertions=0, calls=0)
    record = records[short_name(item.nodeid)]
    try:
        result = yield
    finally:
        record["assertions"] = counts["assertions"]
    # a test of unittest that failed or skipped itself has left this
    if not record["assertions"] and not getattr(item, "_excinfo", None):
        record["calls"] = calls_of(item)
    return result


def calls_of(item: pytest.Item) -> int:
    """Run the test once more, and count its calls; its outcome is known already."""
    record = records[short_name(item.nodeid)]
    before = dict(record)
    sys.setprofile(count_call)
    try:
        item.runtest()
    except Exception:
        # the second run may differ, and does not decide
        pass
    finally:
        sys.setprofile(None)
    # what the second run reported, in parts or whole, is dropped
    record.clear()
    record.update(before)
    item._excinfo = None  # type: ignore[attr-defined]
    return counts["calls"]


def count_call(frame: FrameType, event: str, argument: object) -> None:
    """Count what CALLS names; `forward` only of a module."""
    name = frame.f_code.co_name
    if event == "call" and name in CALLS:
        counts["calls"] += name != "forward" or isinstance(frame.f_locals.get("self"), torch.nn.Module)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome: failed if any part failed, otherwise that of the body, or of a skip before it."""
    record = records[short_name(report.nodeid)]
    is_part = type(report) is not pytest.TestReport
    if report.failed:
        # the report of the whole test comes after those of its parts
        record.update(outcome="failed", reason=record.get("reason") or why(report))
    elif record.get("outcome") != "failed" and not is_part and (report.when == "call" or report.skipped):
        record.update(outcome=report.outcome, reason=why(report) if report.skipped else "")


def why(report: pytest.TestReport) -> str:
    """The first line of an error, or a skip's reason."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return next(iter(text.splitlines()), "")


def short_name(node: str) -> str:
    """Class and test, without the file's path."""
    return "::".join(node.split("::")[1:])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the records."""
    lines = [json.dumps({"test": name, **record}) for name, record in records.items()]
    Path(os.environ["PEERS_OUT"]).write_text("".join(f"{line}\n" for line in lines))
