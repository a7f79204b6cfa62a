"""Seals: what was changed and is whole loads with a warning, and is sealed anew on demand."""

import json
import os
from pathlib import Path

import pytest
import torch
from test_checkpoints import flip, refusal, small_model

from relpos.cli import run
from relpos.translation import checkpoints
from relpos.translation.checkpoints import changes, seal, verify
from relpos.translation.errors import InputError, RelposWarning
from relpos.translation.loading import check_seal, load_model, seal_model

LARGE = 3 * 2**20  # bytes; a file that is not compared whole on load


def fine_tune(folder: Path) -> None:
    """Load the model, change it, and save it over itself, as a user of transformers does."""
    model, tokenizer = load_model(folder)
    with torch.no_grad():
        model.model.shared.weight.add_(0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_model_fine_tuned_in_place_loads_with_a_warning_until_it_is_sealed_anew(sealed, capsys) -> None:
    size = (sealed / "model.safetensors").stat().st_size
    fine_tune(sealed)
    assert (sealed / "model.safetensors").stat().st_size == size
    with pytest.warns(RelposWarning, match="no longer matches its seal") as told:
        model, _ = load_model(sealed)
    assert f"relpos seal {sealed}" in str(told[0].message)
    torch.testing.assert_close(model.model.shared.weight, small_model().model.shared.weight + 0.25)
    assert run(["seal", "--check", str(sealed)]) == 1
    assert f"{sealed / 'model.safetensors'}: its content was changed after saving" in capsys.readouterr().err
    assert run(["seal", str(sealed)]) == 0
    assert run(["seal", "--check", str(sealed)]) == 0
    assert capsys.readouterr().out == f"{sealed}: sealed.\n{sealed}: every file matches the seal.\n"
    load_model(sealed)


def test_a_folder_saved_anew_in_shards_loads_with_a_warning(sealed) -> None:
    small_model(1).save_pretrained(sealed, max_shard_size="10KB")
    assert "has both model.safetensors and model.safetensors.index.json. Remove the one that" in refusal(
        sealed
    )
    (sealed / "model.safetensors").unlink()
    with pytest.warns(RelposWarning, match=r"model\.safetensors: missing. The model no longer matches"):
        model, _ = load_model(sealed)
    assert torch.equal(model.model.shared.weight, small_model(1).model.shared.weight)
    seal_model(sealed)
    verify(sealed)


@pytest.fixture
def large(tmp_path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(LARGE))
    seal(folder)
    return folder


def test_loading_reads_of_a_large_file_samples_alone(large, monkeypatch) -> None:
    assert changes(large) == []
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: pytest.fail(f"{path} was read whole"))
    assert changes(large) == []
    (large / "weights").write_bytes(os.urandom(LARGE))
    assert [change.told for change in changes(large)] == ["its content was changed after saving"]


@pytest.mark.parametrize("place", [0, LARGE - 1])
def test_samples_reach_from_the_first_byte_to_the_last(large, place) -> None:
    content = bytearray((large / "weights").read_bytes())
    content[place] ^= 1
    (large / "weights").write_bytes(bytes(content))
    assert len(changes(large)) == 1


def test_one_byte_between_the_samples_is_found_by_verify(large) -> None:
    content = bytearray((large / "weights").read_bytes())
    content[5000] ^= 1
    (large / "weights").write_bytes(bytes(content))
    assert changes(large) == []
    with pytest.raises(InputError, match="its content was changed after saving"):
        verify(large)


def test_a_seal_of_before_there_were_samples_tells_by_sizes(large) -> None:
    content = json.loads((large / "seal.json").read_text())
    content["files"]["weights"].pop("sample")
    (large / "seal.json").write_text(json.dumps(content))
    (large / "weights").write_bytes(os.urandom(LARGE))
    assert changes(large) == []
    (large / "weights").write_bytes(os.urandom(LARGE + 1))
    assert changes(large)[0].told == (
        f"{LARGE + 1:,} bytes where {LARGE:,} were saved; the file was cut short or changed"
    )


def test_hidden_files_are_no_part_of_a_model(sealed) -> None:
    (sealed / ".cache").mkdir()
    (sealed / ".cache" / "lock").touch()
    seal(sealed)
    (sealed / ".cache" / "lock").write_text("changed")
    verify(sealed)


ENTRY = {"bytes": 3, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        *({name: ENTRY} for name in ("../x", "/etc/passwd", "a/../../x", "", ".", "a//b")),
        *({name: ENTRY} for name in ("\ud800", "a\\..", "c:x")),
        *({"config.json": ENTRY | {"bytes": value}} for value in (float("inf"), -1, True)),
        *({"config.json": entry} for entry in (ENTRY | {"sha256": "x"}, ENTRY | {"sample": 4}, [ENTRY])),
    ],
)
def test_a_seal_with_other_names_or_values_is_damaged(sealed, files) -> None:
    (sealed / "seal.json").write_text(json.dumps({"format": 1, "files": files}))
    assert f"{sealed / 'seal.json'}: the file is damaged." in refusal(sealed)
    with pytest.raises(InputError, match="the file is damaged"):
        verify(sealed)


def test_only_a_model_that_loads_is_sealed_and_a_file_of_another_is_left(sealed, tmp_path) -> None:
    (sealed / "seal.json").write_text("my notes on seals")
    with pytest.raises(InputError, match="the file is damaged"):
        seal_model(sealed)
    assert (sealed / "seal.json").read_text() == "my notes on seals"
    (sealed / "seal.json").unlink()
    flip(sealed / "tokenizer.json")
    with pytest.raises(InputError, match="not a JSON object"):
        seal_model(sealed)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(InputError, match="not a model folder"):
        seal_model(tmp_path / "other")
    assert not (sealed / "seal.json").exists()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.txt"]


def test_a_folder_without_a_seal_has_none_to_compare_with_and_can_be_sealed(sealed) -> None:
    (sealed / "seal.json").unlink()
    with pytest.raises(InputError, match=f"has no seal. Make one with: relpos seal {sealed}"):
        check_seal(sealed)
    # given a run, its model is sealed
    assert seal_model(sealed.parent) == sealed
    assert check_seal(sealed) == sealed
