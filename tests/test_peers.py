"""The rule by which `make test-peers` counts tests, on tests of our own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parent / "peers"
TESTS = """
import unittest
import torch

class TestRule(unittest.TestCase):
    def test_assert_statement(self):
        assert self is not None

    def test_assertion_of_unittest(self):
        self.assertEqual(1, 1)

    def test_assertion_of_torch(self):
        torch.testing.assert_close(torch.ones(1), torch.ones(1))

    def test_call_of_forward(self):
        torch.nn.Linear(1, 1)(torch.ones(1))

    def test_module_that_is_only_made(self):
        torch.nn.Linear(1, 1)

    def test_loop_over_nothing(self):
        for number in ():
            self.assertEqual(number, 1)

    def test_skip_in_the_body(self):
        self.skipTest("nothing to do")

    def test_failure_in_a_part(self):
        with self.subTest("a part"):
            self.assertEqual(1, 2)
"""
KINDS = {
    "test_assert_statement": "passed",
    "test_assertion_of_unittest": "passed",
    "test_assertion_of_torch": "passed",
    "test_call_of_forward": "passed",
    "test_module_that_is_only_made": "empty",
    "test_loop_over_nothing": "empty",
    "test_skip_in_the_body": "skipped",
    "test_failure_in_a_part": "failed",
}


@pytest.fixture(name="counting")
def the_module_that_counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/peers/counting.py, with one reason."""
    monkeypatch.syspath_prepend(PEERS)
    import counting

    monkeypatch.setattr(counting, "REASONS", {"test_known": "it has no positions"})
    return counting


def observed(folder: Path) -> dict[str, dict[str, Any]]:
    """What the plugin writes about TESTS, by the test's name."""
    (folder / "rule.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nenable_assertion_pass_hook = true\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(PEERS),
        "PEERS_OUT": str(folder / "out"),
        "PYTEST_ADDOPTS": "",
    }
    options = ["--noconftest", "-p", "observing", "-p", "no:cacheprovider", "-c", "pytest.ini", "rule.py"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return {record["test"].split("::")[-1]: record for record in records}


def test_tests_without_an_assertion_or_a_call_count_as_empty(tmp_path: Path, counting: Any) -> None:
    records = observed(tmp_path)
    assert {name: counting.kind_of(record) for name, record in records.items()} == KINDS
    assert counting.count(records) == {"passed": 4, "empty": 2, "skipped": 1, "failed": 1}


PASSED = {"outcome": "passed", "assertions": 1, "calls": 0}
FAILED = {"outcome": "failed", "assertions": 0, "reason": "boom"}
SKIPPED = {"outcome": "skipped", "assertions": 0, "reason": "not here", "calls": 0}
EMPTY = {"outcome": "passed", "assertions": 0, "calls": 0}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (FAILED, PASSED, ("failed, there passed", "boom", "")),
        (SKIPPED, PASSED, ("skipped, there passed", "not here", "")),
        (EMPTY, PASSED, ("empty, there passed", "", "")),
        (FAILED, FAILED, ("failed, there failed", "boom", "")),
        (SKIPPED, SKIPPED, None),
        (EMPTY, EMPTY, None),
        (PASSED, FAILED, None),
    ],
)
def test_what_we_fail_or_alone_leave_out_needs_a_reason(
    counting: Any, ours: dict, theirs: dict, expected: tuple[str, str, str] | None
) -> None:
    found = counting.differences({"TestModels::test_new": ours}, {"TestModels::test_new": theirs})
    assert [tuple(difference) for difference in found] == ([("test_new", *expected)] if expected else [])


def test_a_reason_stands_for_its_test_and_is_stale_when_that_passes(counting: Any) -> None:
    failed = {"TestModels::test_known": FAILED}
    passed = {"TestModels::test_known": PASSED}
    (difference,) = counting.differences(failed, passed)
    assert difference.reason == "it has no positions"
    assert counting.stale([failed], [difference]) == []
    assert counting.stale([passed], []) == ["test_known"]
    assert counting.stale([{"TestModels::test_other": PASSED}], []) == []
