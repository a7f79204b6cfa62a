"""DAILY_USE.md: each case is held by tests that exist."""

import pytest

from test_pitfalls_table import NODE, ROOT, TESTS, names_in


def rows() -> list[list[str]]:
    """[case, what happens, held by] of each line of the tables."""
    lines = (TESTS / "DAILY_USE.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if row[0] != "case" and not set(row[0]) <= set("-")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_a_case_names_tests_that_exist(row: list[str]) -> None:
    case, happens, held = row
    assert case
    assert happens.endswith(".")
    for part in held.split("<br>"):
        node = NODE.fullmatch(part)
        assert node, part
        assert node[2] in names_in(ROOT / node[1]), part
