"""PITFALLS.md and DAILY_USE.md: tests that exist hold each law and each case."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NODE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of each line of a page's tables, without their heads."""
    lines = (TESTS / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert all(len(row) == columns for row in cells)
    return [row for row in cells if row[0] not in ("law", "case") and not set(row[0]) <= set("-")]


@cache
def names_in(path: Path) -> set[str]:
    """Names of the tests in a file, as pytest collects them: functions at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")}


def is_test(cell: str) -> bool:
    """Whether it names a test that a file has."""
    node = NODE.fullmatch(cell)
    return node is not None and (ROOT / node[1]).is_file() and node[2] in names_in(ROOT / node[1])


def wrong(held: str) -> list[str]:
    """Parts of a cell that name no test, or one twice."""
    parts = held.split("<br>")
    return [part for part in parts if not is_test(part) or parts.count(part) > 1]


def test_every_law_of_the_pitfalls_names_tests_that_exist_or_where_they_will_stand() -> None:
    laws = rows("PITFALLS.md", 2)
    assert len({law for law, _ in laws}) == len(laws) > 30
    found = {law: wrong(held) for law, held in laws if not re.match(r"open: .", held)}
    assert {law: parts for law, parts in found.items() if parts} == {}


def test_every_test_of_a_pitfall_stands_in_the_table() -> None:
    named = {node for _, held in rows("PITFALLS.md", 2) for node in NODE.findall(held)}
    for path in TESTS.glob("test_pitfalls_*.py"):
        assert {name for file, name in named if file == f"tests/{path.name}"} == names_in(path)


def test_every_case_of_daily_use_says_what_happens_and_names_tests_that_exist() -> None:
    cases = rows("DAILY_USE.md", 3)
    assert cases
    assert [case for case, happens, _ in cases if not case or not happens.endswith(".")] == []
    found = {case: wrong(held) for case, _, held in cases}
    assert {case: parts for case, parts in found.items() if parts} == {}
