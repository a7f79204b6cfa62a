"""PITFALLS.md: each law is held by tests that exist, or says where they will stand."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NODE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, str]]:
    """(law, held by) of each line of the table."""
    lines = (TESTS / "PITFALLS.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert all(len(row) == 2 for row in cells)
    return [(law, held) for law, held in cells if law != "law" and not set(law) <= set("-")]


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file, as pytest collects them: functions at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")}


ROWS = rows()
NAMED = sorted({node for _, held in ROWS for node in NODE.findall(held)})


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_of_the_table_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"{file} is not there"
    assert name in names_in(path), f"{file} has no test {name}"


@pytest.mark.parametrize(("law", "held"), ROWS)
def test_a_law_names_its_tests_or_where_they_will_stand(law: str, held: str) -> None:
    if held.startswith("open: "):
        assert len(held) > len("open: ")
        return
    parts = held.split("<br>")
    assert parts
    assert all(NODE.fullmatch(part) for part in parts), held
    assert len(set(parts)) == len(parts)


def test_no_law_stands_twice() -> None:
    laws = [law for law, _ in ROWS]
    assert len(set(laws)) == len(laws) > 30


@pytest.mark.parametrize("file", sorted(x.name for x in TESTS.glob("test_pitfalls_[!t]*.py")))
def test_every_test_of_a_pitfall_stands_in_the_table(file: str) -> None:
    named = {name for path, name in NAMED if path == f"tests/{file}"}
    assert names_in(TESTS / file) == named
