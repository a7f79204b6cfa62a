"""The test set of `relpos evaluate`: the fields of JSON lines."""

import json
from pathlib import Path

import pytest

from relpos._evaluation_data import field_names, read_test_set
from relpos.translation.errors import UsageError


def test_fields_of_json_lines_are_read_by_name_and_by_path(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"id": 1, "translation": {"en": "one", "de": "eins"}}) + "\n")
    fields = field_names("translation.de, translation.en", [file])
    pairs = read_test_set(tmp_path, [file], fields, tmp_path / "scratch")
    assert (pairs["source"][0], pairs["target"][0]) == ("eins", "one")


@pytest.mark.parametrize(
    ("text", "data", "match"),
    [
        ("en", ["a.jsonl"], "--fields must be two names.*'en'"),
        ("en,", ["a.jsonl"], "--fields must be two names"),
        ("en,de", ["a.tsv"], "one .jsonl file"),
        ("en,de", ["a.jsonl", "b.jsonl"], "one .jsonl file"),
        ("en,de", [], "one .jsonl file"),
    ],
)
def test_fields_that_mean_nothing_are_refused(text: str, data: list[str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        field_names(text, [Path(name) for name in data])
