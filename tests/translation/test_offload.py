"""Weights in memory and on disk: device maps of transformers, and accelerate's offloading."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import model, tokens
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.modeling_utils import LoadStateDictConfig

from relpos.translation.errors import ModelFolderError
from relpos.translation.model import RelposForConditionalGeneration, RelposModel

# accelerate and transformers tell what they do, and accelerate of a device map that names no part of a model
pytestmark = pytest.mark.filterwarnings("ignore:.*(meta device|tied|device_map keys)")

CPU = torch.device("cpu")
GIVEN = {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
PARTS = ("model.encoder", "model.decoder", "lm_head", "model.shared")
KINDS = {
    "tied": {},
    "not tied, one table": {"tie_word_embeddings": False, "output_bias": True, "relative_tied": True},
    "two vocabularies": {"target_vocab_size": 50, "absolute_positions": "learned", "relative_per_head": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def saved(folder: Path, **settings) -> RelposForConditionalGeneration:
    made = model(**settings).float()
    made.save_pretrained(folder)
    return made


def names_on_disk(made: torch.nn.Module) -> set[str]:
    """The names of parameters that are not in memory."""
    return {name for name, weight in made.named_parameters(remove_duplicate=False) if weight.is_meta}


def assert_same(found: RelposForConditionalGeneration, true: RelposForConditionalGeneration) -> None:
    """The outputs of a call, and of a search that decodes with a cache."""
    torch.testing.assert_close(found(**GIVEN).logits, true(**GIVEN).logits)
    search = {"num_beams": 2, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(
        found.generate(GIVEN["input_ids"], **search), true.generate(GIVEN["input_ids"], **search)
    )


def load(folder: Path, **options) -> RelposForConditionalGeneration:
    return RelposForConditionalGeneration.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    "devices", [("cpu", "disk", "cpu", "cpu"), ("disk", "cpu", "cpu", "disk"), ("disk",) * 4]
)
def test_parts_in_memory_and_on_disk_give_the_same(devices, tmp_path: Path) -> None:
    made = saved(tmp_path)
    places = dict(zip(PARTS, devices, strict=True))
    found = load(tmp_path, device_map=places)
    assert_same(found, made)
    on_disk = names_on_disk(found)
    for part in ("model.encoder", "model.decoder"):
        tables = {
            f"{part}.layers.{i}.self_attn.relative_position_{x}" for i in (0, 1) for x in ("keys", "values")
        }
        assert (tables <= on_disk) == (places[part] == "disk"), on_disk
    assert ("model.shared.weight" in on_disk) == (set(devices) == {"disk"})


def test_shared_embeddings_are_in_memory_if_one_of_their_parts_is(tmp_path: Path) -> None:
    made = saved(tmp_path, encoder_layers=1, decoder_layers=1)
    for devices in product(("cpu", "disk"), repeat=4):
        places = dict(zip(PARTS, devices, strict=True))
        found = load(tmp_path, device_map=places)
        assert ("model.shared.weight" in names_on_disk(found)) == ("cpu" not in devices)
        torch.testing.assert_close(found(**GIVEN).logits, made(**GIVEN).logits)
        assert places == dict(zip(PARTS, devices, strict=True)), "the caller's map was changed"


@kinds
def test_every_kind_of_model_runs_with_its_decoder_on_disk(kind, tmp_path: Path) -> None:
    made = saved(tmp_path, **KINDS[kind])
    found = load(tmp_path, device_map={"": "cpu", "model.decoder": "disk"})
    assert "model.decoder.layers.1.fc1.weight" in names_on_disk(found)
    assert_same(found, made)


def test_weights_on_disk_stay_in_the_files_of_the_model(tmp_path: Path) -> None:
    made = model().float()
    made.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 2
    found = load(tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "other")
    assert_same(found, made)
    assert [*(tmp_path / "other").glob("*.safetensors")] == []


def test_layers_can_be_placed_one_by_one(tmp_path: Path) -> None:
    made = saved(tmp_path)
    places = {"": "cpu", "model.encoder.layers.1": "disk", "model.decoder.layers.0": "disk"}
    found = load(tmp_path, device_map=places)
    starts = ("model.encoder.layers.1.", "model.decoder.layers.0.")
    assert names_on_disk(found) == {name for name, _ in made.named_parameters() if name.startswith(starts)}
    assert_same(found, made)


@pytest.mark.parametrize(("share", "is_split"), [(0.7, True), (0.2, False)])
def test_an_automatic_map_moves_to_disk_what_does_not_fit(share, is_split, tmp_path: Path) -> None:
    made = saved(tmp_path)
    size = sum(weight.numel() * weight.element_size() for weight in made.parameters())
    found = load(tmp_path, device_map="auto", max_memory={"cpu": int(size * share)})
    assert ("cpu" in found.hf_device_map.values()) == is_split
    assert "disk" in found.hf_device_map.values()
    assert_same(found, made)


def test_an_automatic_map_keeps_in_memory_what_fits(tmp_path: Path) -> None:
    made = saved(tmp_path)
    found = load(tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    assert names_on_disk(found) == set()
    assert_same(found, made)


def as_first_format(folder: Path) -> None:
    """Rewrite the weights in `folder` with the names and packed projections of format 1."""
    weights = load_file(folder / "model.safetensors")
    old = {}
    renamed = (
        ("model.", ""),
        ("embed_tokens", "embedding.tokens"),
        ("encoder_attn_layer_norm", "norm2"),
        ("encoder_attn", "multihead_attn"),
        ("self_attn_layer_norm", "norm1"),
        ("fc1", "linear1"),
        ("fc2", "linear2"),
    )
    for name, weight in weights.items():
        last = "norm3" if "decoder" in name else "norm2"
        new = name.replace("final_layer_norm", last)
        for present, before in renamed:
            new = new.replace(present, before)
        new = new.replace("coder.layer_norm", "coder.norm")
        if "k_proj" in new or "v_proj" in new:
            continue
        if "q_proj" in new:
            weight = torch.cat([weights[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
            new = new.replace("q_proj.", "in_proj_")
        old[new] = weight
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": 1}))


@pytest.mark.parametrize("places", [{"": "disk"}, {"": "cpu", "model.encoder": "disk"}])
def test_converted_weights_go_to_the_folder_for_them(places, tmp_path: Path) -> None:
    made = saved(tmp_path / "model")
    as_first_format(tmp_path / "model")
    found = load(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    name = "model.encoder.layers.0.self_attn.q_proj.weight"
    assert name in names_on_disk(found)
    assert (tmp_path / "disk" / f"{name}.safetensors").exists()
    assert_same(found, made)
    with pytest.raises(ValueError, match="`offload_folder`"):
        load(tmp_path / "model", device_map=places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_on_disk_take_the_dtype_that_was_asked_for(dtype, tmp_path: Path) -> None:
    saved(tmp_path)
    found = load(tmp_path, device_map={"": "cpu", "model.decoder": "disk"}, dtype=dtype)
    true = load(tmp_path, dtype=dtype)
    logits = found(**GIVEN).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, true(**GIVEN).logits)


def test_weights_that_stay_on_disk_are_checked(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.decoder.layers.1.fc1.weight"
    weights[name][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=name):
        load(tmp_path, device_map={"": "disk"})
    weights[name] = weights[name][:-1].nan_to_num()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=name):
        load(tmp_path, device_map={"": "disk"})


def test_a_model_without_its_output_layer_runs_from_the_disk(tmp_path: Path) -> None:
    made = saved(tmp_path)
    true = made.model(**GIVEN).last_hidden_state
    for cls, places in ((RelposModel, {"": "disk"}), (AutoModel, {"": "cpu", "encoder": "disk"})):
        found = cls.from_pretrained(tmp_path, device_map=places)
        assert "encoder.layers.0.self_attn.relative_position_keys" in names_on_disk(found)
        torch.testing.assert_close(found(**GIVEN).last_hidden_state, true)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_model_on_disk_is_saved_whole(tmp_path: Path) -> None:
    made = saved(tmp_path / "model")
    places = {"": "cpu", "model.encoder": "disk"}
    load(tmp_path / "model", device_map=places).save_pretrained(tmp_path / "again")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    true = made.state_dict()
    assert again.state_dict().keys() == true.keys()
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, true[name]), name


def test_weights_of_an_adapter_are_loaded_as_transformers_does_it() -> None:
    made = model().float()
    name = "model.encoder.layers.0.fc1.weight"
    found, _ = made._load_pretrained_model(
        model=made,
        state_dict={name: torch.ones(24, 16)},
        checkpoint_files=None,
        load_config=LoadStateDictConfig(dtype=torch.float32),
        expected_keys=[name],
    )
    assert name not in found.missing_keys
    assert torch.equal(made.get_parameter(name), torch.ones(24, 16))


def offloaded_to_memory(made, folder: Path):
    return accelerate.cpu_offload(made, execution_device=CPU)


def offloaded_to_disk(made, folder: Path):
    return accelerate.disk_offload(made, str(folder), execution_device=CPU)


def dispatched(made, folder: Path):
    places = {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu", "model.shared": "cpu"}
    return accelerate.dispatch_model(made, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize("kind", ["tied", "two vocabularies"])
@pytest.mark.parametrize("offload", [offloaded_to_memory, offloaded_to_disk, dispatched])
def test_accelerates_offloading_changes_no_output(kind: str, offload: Callable, tmp_path: Path) -> None:
    made, true = (model(**KINDS[kind]).float() for _ in range(2))
    found = offload(made, tmp_path)
    on_disk = names_on_disk(found)
    assert "model.decoder.layers.1.self_attn.relative_position_keys" in on_disk
    if offload is not dispatched:
        assert on_disk == {name for name, _ in true.named_parameters(remove_duplicate=False)}
    assert_same(found, true)
    # each weight was given back, but for embeddings, which are in memory by another name
    assert names_on_disk(found) >= on_disk - {"model.decoder.embed_tokens.weight"}
