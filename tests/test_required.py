"""A backend that skips what it must run fails the run, and the counts are printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.skips import MAY_SKIP
from relpos.backends import BACKENDS
from required import Tally, complaints

LISTED = {"picky": ("attn_mask must", "dropout_p must")}


def tally(ran: int, *reasons: str) -> Tally:
    made = Tally()
    made.ran["picky"] += ran
    for i, reason in enumerate(reasons):
        made.skip("picky", f"case {i}", reason)
    return made


def test_listed_reasons_may_skip() -> None:
    skips = ("picky: attn_mask must be None", "picky: dropout_p must be 0; attn_mask must be None")
    assert complaints(tally(3, *skips), ["picky"], LISTED, 0.5) == []


@pytest.mark.parametrize(
    "reason",
    [
        "picky: no compiler was found",
        "picky: attn_mask must be None; no compiler was found",
        "other: attn_mask must be None",
        "attn_mask must be None",
        "it is Monday",
        "",
    ],
)
def test_a_skip_for_any_other_reason_is_a_complaint_that_names_case_and_reason(reason: str) -> None:
    found = complaints(tally(3, reason), ["picky"], LISTED, 0.5)
    assert found == [f"case 0 must run or be skipped for a listed reason; got {reason!r}."]


def test_a_backend_without_a_list_may_skip_nothing() -> None:
    assert len(complaints(tally(3, "picky: attn_mask must be None"), ["picky"], {}, 0.5)) == 1


@pytest.mark.parametrize(("ran", "skipped", "is_enough"), [(2, 2, True), (1, 2, False), (0, 3, False)])
def test_a_backend_must_run_its_share_whatever_is_listed(ran: int, skipped: int, is_enough: bool) -> None:
    found = complaints(tally(ran, *["picky: attn_mask must be None"] * skipped), ["picky"], LISTED, 0.5)
    told = f"picky must run at least 50% of its cases; ran {ran} of {ran + skipped}."
    assert found == ([] if is_enough else [told])


def test_a_backend_of_which_nothing_is_heard_is_a_complaint_where_shares_count() -> None:
    told = "silent must run at least 50% of its cases; ran 0 of 0."
    assert complaints(tally(3), ["picky", "silent"], LISTED, 0.5) == [told]
    assert complaints(tally(3), ["picky", "silent"], LISTED, 0.0) == []


BODY = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("backend", [{first!r}])
@settings(max_examples=3, database=None)
@given(number=st.integers())
def test_property(backend, number):
    pytest.skip("{first}: {listed}")

@pytest.mark.parametrize("backend", {names})
@pytest.mark.parametrize("number", range(4))
def test_case(backend, number):
    if backend == {first!r} and number == 0:
        pytest.skip("the backend is not in the mood")
"""


def test_unlisted_skips_and_skipped_properties_fail_a_run_that_prints_its_counts(tmp_path: Path) -> None:
    first = next(iter(MAY_SKIP))
    listed, others = MAY_SKIP[first][0], [x.name for x in BACKENDS if x.name != first]
    (tmp_path / "test_cases.py").write_text(BODY.format(names=[first, *others], first=first, listed=listed))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "required", "-p", "no:cacheprovider", "-n", "1"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    counts = [f"{x.name} {'3 run, 2' if x.name == first else '4 run, 0'} skipped" for x in BACKENDS]
    assert f"conformance: {'; '.join(counts)}\n" in done.stdout
    assert f"got 'all examples of a property: {first}: {listed}'." in done.stdout
    assert "must run or be skipped for a listed reason; got 'the backend is not in the mood'." in done.stdout
    assert done.returncode == 1
