"""Folders of models: whole ones load, and each way of not being whole is told in one sentence."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relpos.translation.checkpoints import (
    average_weights,
    is_sealed,
    save_sealed,
    seal,
    sealed_checkpoints,
    verify,
    write_weights,
)
from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError
from relpos.translation.loading import load_model
from relpos.translation.model import RelposForConditionalGeneration

VOCABULARY = 270
WEIGHT = "model.encoder.layers.0.fc1.weight"
TEXTS = ["red green blue one two three cat dog"] * 30


def small_model(seed: int = 0, **settings) -> RelposForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "d_ff": 24}
    config = RelposConfig(vocab_size=VOCABULARY, **sizes, relative_max_distance=2, **settings)
    return RelposForConditionalGeneration(config).eval()


@pytest.fixture
def unsealed(sealed) -> Path:
    """The same without its seal, so that what lies behind is reached."""
    (sealed / "seal.json").unlink()
    return sealed


def refusal(folder: Path) -> str:
    """The message for a folder that must not load: one line that ends as a sentence."""
    with pytest.raises(InputError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert str(folder) in message
    return message


def change_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    write_weights(weights, folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 0x10
    path.write_bytes(bytes(content))


def test_a_whole_folder_loads_in_evaluation_mode_and_gives_the_same(whole) -> None:
    model, tokenizer = load_model(whole)
    ids = torch.tensor([tokenizer("red cat").input_ids])
    assert not model.training
    true = small_model()(ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, true)


def test_an_untied_model_loads_too(whole, tmp_path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "untied"))
    small_model(tie_word_embeddings=False).save_pretrained(folder)
    seal(folder)
    model, _ = load_model(folder)
    assert model.lm_head.weight is not model.model.shared.weight
    assert torch.equal(model.lm_head.weight, small_model(tie_word_embeddings=False).lm_head.weight)


def test_a_tied_weight_may_be_written_under_each_of_its_names(unsealed) -> None:
    change_weights(unsealed, lambda w: w.update({"lm_head.weight": w["model.shared.weight"].clone()}))
    model, _ = load_model(unsealed)
    assert torch.equal(model.model.shared.weight, small_model().model.shared.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_cut_short_is_named_with_both_sizes(sealed, name) -> None:
    size = (sealed / name).stat().st_size
    cut(sealed / name)
    told = f"{size - 100:,} bytes where {size:,} were saved; the file was cut short or changed. Copy or train"
    assert f"{sealed / name}: " in refusal(sealed)
    assert told in refusal(sealed)
    with pytest.raises(InputError, match=f"{name}: {told} the model again"):
        verify(sealed)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_flipped_byte_is_found(sealed, name) -> None:
    flip(sealed / name)
    with pytest.raises(InputError) as caught:
        verify(sealed)
    told = f"{sealed / name}: its content was changed after saving. Copy or train the model again."
    assert str(caught.value) == told


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_flipped_byte_that_makes_a_file_unreadable_is_told_with_the_reason(sealed, name) -> None:
    flip(sealed / name)
    assert refusal(sealed) == (
        f"{sealed / name}: not a JSON object; the file is damaged; its content was changed after saving. "
        "Copy or train the model again."
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_a_missing_file_is_named(sealed, name) -> None:
    (sealed / name).unlink()
    assert refusal(sealed) == f"{sealed}: the file {name} is missing. Copy or train the model again."


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": 3}', '{"files": {"a": 1}}'])
def test_a_damaged_seal_is_told(sealed, content) -> None:
    (sealed / "seal.json").write_text(content)
    assert refusal(sealed) == (
        f"{sealed / 'seal.json'}: the file is damaged. Copy or train the model again, or remove this file "
        "and create a new one with relpos seal."
    )


@pytest.mark.parametrize("content", [b"", b"abc" * 100, None])
def test_weights_that_cannot_be_read_are_told(unsealed, content) -> None:
    path = unsealed / "model.safetensors"
    if content is None:
        cut(path)
    else:
        path.write_bytes(content)
    assert refusal(unsealed).startswith(f"{path}: the weights cannot be read (")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.pop(WEIGHT), f"does not fit its config.json; weights missing: {WEIGHT}."),
        # though they are tied
        (lambda w: w.pop("model.shared.weight"), "weights missing: model.shared.weight."),
        (lambda w: w.update({"a.b": w.pop(WEIGHT)}), f"weights missing: {WEIGHT}; unknown: a.b."),
        (
            lambda w: w.update({WEIGHT: torch.zeros(3, 5)}),
            f"of another shape: {WEIGHT} ([3, 5], not [24, 16]).",
        ),
    ],
)
def test_missing_and_unknown_weights_are_listed_by_name(unsealed, change, told) -> None:
    change_weights(unsealed, change)
    assert refusal(unsealed).endswith(told)


def test_of_many_faults_five_are_listed_and_the_rest_counted(unsealed) -> None:
    change_config(unsealed, encoder_layers=2, relative_values=False)
    told = " and 12 more; unknown: model.decoder.layers.0.self_attn.relative_position_values, "
    assert told in refusal(unsealed)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\x00"])
def test_a_damaged_configuration_is_told(unsealed, content) -> None:
    (unsealed / "config.json").write_bytes(content)
    assert refusal(unsealed) == f"{unsealed / 'config.json'}: not a JSON object; the file is damaged."


@pytest.mark.parametrize("kind", ["bert", None])
def test_another_kind_of_model_is_refused(unsealed, kind) -> None:
    change_config(unsealed, model_type=kind)
    assert refusal(unsealed) == f"{unsealed}: model_type must be 'relpos'; got {kind!r}."


def test_a_tokenizer_with_more_subwords_than_the_model_is_refused(unsealed) -> None:
    change_config(unsealed, vocab_size=260)
    change_weights(
        unsealed, lambda w: w.update({"model.shared.weight": w["model.shared.weight"][:260].clone()})
    )
    told = refusal(unsealed)
    assert f"the tokenizer has {VOCABULARY} subwords and the model 260; they do not belong together." in told


def test_a_folder_that_is_not_there_is_told(tmp_path) -> None:
    folder = tmp_path / "nowhere"
    assert refusal(folder) == f"{folder}: no such folder. Give the folder of a model or of a training run."


def test_an_empty_folder_is_told(tmp_path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: not a model folder, there is no config.json in it."


def test_a_run_without_a_finished_model_names_its_whole_checkpoints(tmp_path) -> None:
    told = "this run has no finished model yet. Finish it with --resume, or give one of its checkpoints: "
    (tmp_path / "checkpoints").mkdir()
    assert refusal(tmp_path) == f"{tmp_path}: {told}none."
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-3"):
        (tmp_path / "checkpoints" / name).mkdir()
        if name != "checkpoint-3":
            seal(tmp_path / "checkpoints" / name)
    assert refusal(tmp_path) == f"{tmp_path}: {told}checkpoint-20, checkpoint-100."


class _Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "model.safetensors"])
def test_pickled_weights_are_refused_and_never_unpickled(unsealed, tmp_path, name) -> None:
    (unsealed / "model.safetensors").unlink()
    mark = tmp_path / "unpickled"
    (unsealed / name).write_bytes(pickle.dumps(_Trap(mark)))
    told = refusal(unsealed)
    assert (
        "weights cannot be read" if name == "model.safetensors" else "model.safetensors is missing"
    ) in told
    assert not mark.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_writer_that_fails_half_way_leaves_the_old_folder_whole(sealed, error) -> None:
    before = {path.name: path.read_bytes() for path in sealed.iterdir()}

    def fail(draft: Path) -> None:
        (draft / "config.json").write_text("{}")
        raise error("half-way")

    with pytest.raises(error, match="half-way"):
        save_sealed(sealed, fail)
    assert {path.name: path.read_bytes() for path in sealed.iterdir()} == before
    assert [path.name for path in sealed.parent.iterdir()] == ["model"]
    load_model(sealed)


def test_saving_replaces_the_old_folder_and_nothing_beside_it(tmp_path) -> None:
    folder = tmp_path / "deep" / "model"
    (tmp_path / "deep" / "model.part").mkdir(parents=True)
    (tmp_path / "deep" / "model.part" / "leftover").touch()
    for name in ("first", "second"):
        save_sealed(folder, lambda draft, name=name: (draft / name).write_text(name))
        assert {path.name for path in folder.iterdir()} == {name, "seal.json"}
        assert {path.name for path in folder.parent.iterdir()} == {"model", "model.part"}
        assert (tmp_path / "deep" / "model.part" / "leftover").exists()
        assert is_sealed(folder)
        verify(folder)


def test_a_folder_without_a_model_file_that_was_sealed_verifies_in_its_subfolders_too(tmp_path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("a")
    seal(tmp_path)
    verify(tmp_path)
    (tmp_path / "inner" / "file").write_text("b")
    with pytest.raises(InputError, match="inner/file: its content was changed after saving"):
        verify(tmp_path)


def test_checkpoints_are_counted_by_number_and_only_whole_ones(tmp_path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.part", "checkpoint-best", "other-3"):
        (tmp_path / name).mkdir()
        seal(tmp_path / name)
    (tmp_path / "checkpoint-12").mkdir()
    assert [path.name for path in sealed_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert sealed_checkpoints(tmp_path / "nowhere") == []


def test_averaged_weights_are_the_mean(tmp_path) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    models = [small_model(seed) for seed in range(3)]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    averaged = average_weights(folders)
    assert set(averaged) == {name for name, _ in models[0].named_parameters()}
    for name, weight in averaged.items():
        assert weight.dtype == torch.float32
        true = torch.stack([model.get_parameter(name).double() for model in models]).mean(0)
        torch.testing.assert_close(weight.double(), true, atol=1e-7, rtol=1e-6)


def test_models_with_different_weights_are_not_averaged(tmp_path) -> None:
    for i, weights in enumerate(({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)})):
        (tmp_path / str(i)).mkdir()
        save_file(weights, tmp_path / str(i) / "model.safetensors")
    with pytest.raises(ValueError, match=r"must have the same weights; .*1 differs in b\.$"):
        average_weights([tmp_path / "0", tmp_path / "1"])
