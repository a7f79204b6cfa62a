"""Sources as recipes name them, and data sets of Hugging Face, without a network."""

import datasets
import huggingface_hub
import pytest
from datasets.exceptions import DatasetGenerationError
from pydantic import ValidationError

from relpos.translation.corpora import Source


@pytest.fixture
def saved(tmp_path):
    """A folder with the splits train and validation."""
    rows = {"source": ["one"], "target": ["eins"], "translation": [{"en": "1", "de": "I"}]}
    splits = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict(rows) for name in ("train", "validation")}
    )
    splits.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "exactly one of tsv, files, jsonl, dataset, catalogs, numbers; got none"),
        ({"tsv": "a", "jsonl": "b"}, "got tsv and jsonl"),
        ({"tsv": "a", "fields": ["a", "b"]}, "fields belongs to jsonl and dataset, not to tsv"),
        ({"jsonl": "a", "split": "b"}, "split belongs to dataset, not to jsonl"),
        ({"tsv": "a", "columns": [1, 1]}, r"two different numbers >= 0; got \[1, 1\]"),
        ({"tsw": "a"}, "Extra inputs are not permitted"),
        ({"tsv": "a", "limit": 0}, "greater than 0"),
        ({"numbers": {"lines": 1, "shortest": 3, "longest": 2}}, "must be at most longest; got 3 and 2"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        Source(**keys)


def test_a_saved_data_set_is_read(saved, read):
    assert read(dataset=str(saved)) == [("one", "eins")]
    assert read(dataset=str(saved), split="validation", fields=["translation.en", "translation.de"]) == [
        ("1", "I")
    ]
    assert read(dataset=str(saved / "train")) == [("one", "eins")]


def test_a_folder_of_files_is_read(tmp_path, read):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text("en,de\none,eins\n")
    assert read(dataset=str(folder), fields=["en", "de"]) == [("one", "eins")]


def test_an_unknown_split_or_field_is_told_with_the_nearest(saved, failure):
    message = failure(dataset=str(saved), split="valdation")
    assert f"{saved} has no split 'valdation'; the nearest is 'validation'." in message
    message = failure(dataset=str(saved), fields=["sorce", "target"])
    assert message.startswith(f"dataset {saved} row 1 has no field 'sorce'; the nearest is 'source'. ")


def test_an_unknown_split_of_a_folder_of_files_is_told(tmp_path, failure):
    (tmp_path / "train.csv").write_text("source,target\none,eins\n")
    message = failure(dataset=str(tmp_path), split="tset")
    assert f"{tmp_path}, split tset cannot be loaded: Unknown split" in message


def test_a_missing_folder_and_a_file_are_no_data_set(tmp_path, failure):
    assert "dataset: the folder ./no/such does not exist" in failure(dataset="./no/such")
    (tmp_path / "a.tsv").write_text("a\tb\n")
    assert "must be a name or a folder; got the file" in failure(dataset=str(tmp_path / "a.tsv"))


def test_an_unreachable_hub_is_told_at_once(failure, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    message = failure(dataset="no-one/no-such-set")
    assert "'no-one/no-such-set' is neither a local folder nor in the cache" in message
    assert "cannot be reached (ConnectionError); check the name and the network." in message


def test_a_data_set_of_the_hub_is_loaded_without_its_code(read, monkeypatch):
    asked = {}

    def load_dataset(name, config, split, **options):
        asked.update(name=name, config=config, split=split, options=options)
        return datasets.Dataset.from_dict({"translation": [{"en": "one", "de": "eins"}]})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fields = ["translation.en", "translation.de"]
    assert read(dataset="some/set", config="de-en", split="test", fields=fields) == [("one", "eins")]
    assert asked == {"name": "some/set", "config": "de-en", "split": "test", "options": {}}


def test_a_full_disk_is_told_where_a_data_set_is_loaded(failure, tmp_path, monkeypatch):
    def load_dataset(*args, **options):
        full = OSError(28, "No space left on device")
        raise DatasetGenerationError("An error occurred while generating the dataset") from full

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = f"{tmp_path}, split train cannot be loaded: [Errno 28] No space left on device"
    assert message in failure(dataset=str(tmp_path))
