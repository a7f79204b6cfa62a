"""Models of format 1: they load as they did, can be converted, and are refused where they would go wrong.

The folders in data/format_1 were written by data/make_format_1.py.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoints import TEXTS, change_config, change_weights, refusal
from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM

from relpos.cli import run as relpos
from relpos.translation import experiments
from relpos.translation.checkpoints import average_weights, seal, sealed_checkpoints, verify
from relpos.translation.config import FORMAT, RelposConfig
from relpos.translation.conversion import convert_model
from relpos.translation.errors import InputError, RelposWarning
from relpos.translation.experiments import Experiment, run_experiment
from relpos.translation.generation import Translator
from relpos.translation.loading import load_model
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.old_formats import convert_shapes, convert_weights, is_first_format, old_names
from relpos.translation.ownership import working_in
from relpos.translation.tokenizer import train_tokenizer
from relpos.translation.training import train
from relpos.translation.weights import read_header

DATA = Path(__file__).parent / "data" / "format_1"
FOLDERS = ["tables_by_head", "post_norm", "shards"]
PACKED = "encoder.layers.0.self_attn.in_proj_weight"

# names of format 1 by names of format 2, one piece after another: the inverse of what relpos does
_BACK = (
    ("model.", ""),
    ("embed_tokens.", "embedding.tokens."),
    ("embed_positions.", "embedding.positions."),
    ("self_attn_layer_norm.", "norm1."),
    ("encoder_attn_layer_norm.", "norm2."),
    ("encoder_attn.", "multihead_attn."),
    ("fc", "linear"),
)


def first_format(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of format 2 as format 1 has them."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        old = name
        for new, before in _BACK:
            old = old.replace(new, before)
        last = "norm3." if old.startswith("decoder.") else "norm2."
        old = old.replace("final_layer_norm.", last)
        for side in ("encoder", "decoder"):
            old = old.replace(f"{side}.layer_norm.", f"{side}.norm.")
        for part in "qkv":
            if f".{part}_proj." in old:
                place, _, kind = old.partition(f".{part}_proj.")
                others = [weights[name.replace(f".{part}_proj.", f".{each}_proj.")] for each in "qkv"]
                old, weight = f"{place}.in_proj_{kind}", torch.cat(others)
        found[old] = weight.clone()
    return found


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 270).save_pretrained(folder)
    return folder


@pytest.fixture
def old(tmp_path, tokenizer_files) -> Callable[[str], Path]:
    """A copy of a folder of format 1, with a tokenizer."""

    def copy(name: str = FOLDERS[0]) -> Path:
        folder = Path(shutil.copytree(DATA / name, tmp_path / name))
        shutil.copytree(tokenizer_files, folder, dirs_exist_ok=True)
        return folder

    return copy


def check_logits(model: RelposForConditionalGeneration, name: str) -> None:
    """Compare with what the code of format 1 computed, in float32."""
    true = load_file(DATA / name / "expected.safetensors")
    model = model.float().eval()
    found = model(true["sources"], attention_mask=true["mask"], decoder_input_ids=true["targets"]).logits
    torch.testing.assert_close(found, true["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_format_1_loads_with_the_logits_it_had(old, name) -> None:
    folder = old(name)
    assert read_header(folder).is_old
    for load in (RelposForConditionalGeneration.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained):
        check_logits(load(folder), name)
    model, _ = load_model(folder)
    assert (model.config.format, model.generation_config.num_beams) == (FORMAT, 3)
    check_logits(model, name)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_format_1_loads_without_its_output_layer(old, name) -> None:
    folder = old(name)
    found = AutoModel.from_pretrained(folder).state_dict()
    true = RelposForConditionalGeneration.from_pretrained(folder).model.state_dict()
    assert found.keys() == true.keys()
    for weight in found:
        assert torch.equal(found[weight], true[weight]), weight


def test_a_state_dict_of_format_1_loads_into_a_model(old) -> None:
    folder = old("post_norm")
    true, _ = load_model(folder)
    made = RelposForConditionalGeneration(true.config)
    # as transformers' own trainer loads a checkpoint
    found = made.load_state_dict(load_file(folder / "model.safetensors"), False)
    assert set(found.missing_keys) <= set(made.all_tied_weights_keys)
    assert not found.unexpected_keys
    for name, weight in made.state_dict().items():
        torch.testing.assert_close(weight, true.state_dict()[name].float(), msg=name)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_converted_folder_has_the_same_weights_tokens_and_logits(old, name, tmp_path) -> None:
    folder = old(name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    out = convert_model(folder, tmp_path / "deep" / "new")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert out == tmp_path / "deep" / "new"
    verify(out)
    assert not read_header(out).is_old
    config = json.loads((out / "config.json").read_text())
    assert config["format"] == FORMAT
    assert config["dtype"] == "float16"
    assert json.loads((out / "generation_config.json").read_text())["num_beams"] == 3
    model, tokenizer = load_model(out)
    true, true_tokenizer = load_model(folder)
    for weight, value in true.state_dict().items():
        assert torch.equal(model.state_dict()[weight], value), weight
        assert model.state_dict()[weight].dtype == torch.float16
    assert tokenizer("red cat, zebra").input_ids == true_tokenizer("red cat, zebra").input_ids
    check_logits(model, name)


def test_the_recipe_is_copied_as_it_is_and_may_be_absent(old, tmp_path) -> None:
    folder = old()
    assert not (convert_model(folder, tmp_path / "first") / "recipe.yaml").exists()
    (folder / "recipe.yaml").write_text("training: {max_length: 7}\n")
    out = convert_model(folder, tmp_path / "second")
    assert (out / "recipe.yaml").read_text() == "training: {max_length: 7}\n"
    (folder / "recipe.yaml").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"recipe\.yaml: not a text in UTF-8"):
        convert_model(folder, tmp_path / "third")
    (folder / "recipe.yaml").unlink()
    (folder / "recipe.yaml").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"recipe\.yaml: not a regular file\."):
        convert_model(folder, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_model_card_is_copied_and_none_is_made_of_a_recipe_that_cannot_be_read(old, tmp_path) -> None:
    folder = old()
    (folder / "recipe.yaml").write_text("unknown: 3\n")
    assert not (convert_model(folder, tmp_path / "first") / "README.md").exists()
    (folder / "README.md").write_text("Mine.\n")
    assert (convert_model(folder, tmp_path / "second") / "README.md").read_text() == "Mine.\n"


def test_the_command_converts_a_model_once_and_tells_where(old, tmp_path, capsys) -> None:
    folder, out = old(), tmp_path / "new"
    out.mkdir()
    assert relpos(["convert", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}: converted.\n", "")
    assert relpos(["seal", "--check", str(out)]) == 0
    capsys.readouterr()
    assert relpos(["convert", str(out), "--out", str(tmp_path / "newer")]) == 1
    told = f"relpos: {out}: the model has the present format already. Use it as it is.\n"
    assert capsys.readouterr() == ("", told)
    assert not (tmp_path / "newer").exists()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_model_is_not_written_over_what_is_there(old, tmp_path, kind) -> None:
    folder, out = old(), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        (out / ".hidden").touch()
    told = {"file": "a file", "link": "a link", "folder": "one that holds something"}[kind]
    with pytest.raises(InputError, match=f"{out}: --out must be a new or an empty folder; got {told}"):
        convert_model(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "out"])


def test_what_is_no_whole_model_is_not_converted(old, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(InputError, match=f"{folder}: "):
            convert_model(folder, tmp_path / "new")
    folder = old()
    change_config(folder, d_ff=13)
    with pytest.raises(InputError, match=r"of another shape: .*linear1\.bias \(\[12\], not \[13\]\)"):
        convert_model(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda w: w.pop("encoder.layers.0.norm1.bias"),
            "weights missing: model.encoder.layers.0.self_attn_",
        ),
        (lambda w: w.pop("shared.weight"), "weights missing: model.shared.weight."),
        (lambda w: w.update({"a.b": torch.ones(1)}), "weights unknown: a.b."),
        (
            lambda w: w.update({"encoder.layers.0.linear1.bias": torch.ones(5)}),
            "weights of another shape: encoder.layers.0.linear1.bias ([5], not [12]).",
        ),
        (
            lambda w: w.update({PACKED: torch.ones(24, 7)}),
            f"{PACKED}, k_proj ([8, 7], not [8, 8]), {PACKED}, q_proj ([8, 7], not [8, 8]), ",
        ),
        (
            lambda w: w.update({PACKED: torch.ones(25, 8)}),
            f"{PACKED} must have 3 * d_model rows, for query, key and value; its shape is [25, 8].",
        ),
        (lambda w: w.update({PACKED: torch.tensor(1.0)}), f"{PACKED} must have 3 * d_model rows"),
        (lambda w: w.update({PACKED: torch.ones(0, 8)}), "its shape is [0, 8]."),
        (
            lambda w: w.update({"model.shared.weight": w["shared.weight"].clone()}),
            "must be there once; model.shared.weight is another name of it.",
        ),
        (
            lambda w: w.update({"model.encoder.layers.0.self_attn.k_proj.weight": torch.ones(8, 8)}),
            "must be there once; model.encoder.layers.0.self_attn.k_proj.weight is another name of it.",
        ),
        (lambda w: w[PACKED].fill_(float("nan")), f"not finite (NaN or infinite): {PACKED}; the training"),
    ],
)
def test_a_wrong_weight_of_format_1_is_named_as_it_is_in_the_file(old, tmp_path, change, told) -> None:
    folder = old()
    change_weights(folder, change)
    assert told in refusal(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(InputError, match=r"model\.safetensors: "):
        convert_model(folder, tmp_path / "new")


def test_packed_weights_are_refused_where_shapes_may_differ(old) -> None:
    folder = old()
    change_weights(folder, lambda w: w.update({PACKED: torch.ones(25, 8)}))
    with pytest.raises(ValueError, match=r"must have 3 \* d_model rows.* \[25, 8\]"):
        RelposForConditionalGeneration.from_pretrained(folder, ignore_mismatched_sizes=True)


def random_settings(draw: random.Random) -> dict[str, object]:
    """A small configuration that format 1 could have."""
    return {
        "vocab_size": 11,
        "d_model": 8,
        "num_heads": draw.choice((1, 2, 4)),
        "d_ff": draw.randint(1, 9),
        "encoder_layers": draw.randint(1, 3),
        "decoder_layers": draw.randint(1, 12),
        "norm_first": draw.random() < 0.5,
        "absolute_positions": draw.choice(("none", "sinusoidal", "learned")),
        "max_positions": 7,
        "relative_max_distance": draw.choice((None, 2, [3, 1])),
        "relative_keys": draw.random() < 0.7,
        "relative_values": draw.random() < 0.7,
        "relative_per_head": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
    }


@pytest.mark.parametrize("seed", range(12))
def test_weights_written_in_format_1_come_back_as_they_were(seed, tmp_path) -> None:
    torch.manual_seed(seed)
    model = RelposForConditionalGeneration(RelposConfig(**random_settings(random.Random(seed))))
    for weight in model.parameters():
        weight.data.normal_()
    true = model.state_dict()
    before = first_format(true)
    assert is_first_format(before)
    assert not is_first_format(true)
    assert not any(name.startswith("model.") for name in before)
    found = convert_weights(before)
    assert found.keys() == true.keys()
    assert old_names(before).keys() == true.keys()
    for name, weight in true.items():
        assert torch.equal(found[name], weight), name
    shapes = convert_shapes({name: list(weight.shape) for name, weight in before.items()})
    assert shapes == {name: list(weight.shape) for name, weight in true.items()}
    model.save_pretrained(tmp_path)
    save_file(first_format(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    loaded = RelposForConditionalGeneration.from_pretrained(tmp_path)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, true[name]), name


def make_old(folder: Path) -> None:
    """Rewrite a model or a checkpoint into format 1, sealed as before."""
    weights = load_file(folder / "model.safetensors")
    save_file(first_format(weights), folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, format=1)
    seal(folder)


@pytest.fixture
def old_run(small_recipe, tmp_path) -> Path:
    """A finished run of format 1."""
    run = tmp_path / "run"
    train(small_recipe(updates=4, evaluate_every=2), run)
    for folder in (*sealed_checkpoints(run / "checkpoints"), run / "model"):
        make_old(folder)
    return run


def test_a_run_of_format_1_is_not_continued_and_not_changed(old_run, small_recipe, tmp_path) -> None:
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    told = r"checkpoint-4: its model must have format 2 to be trained on; got an older one\."
    advice = f"convert it: relpos convert {old_run} --out FOLDER"
    with pytest.raises(InputError, match=f"{told}.*{advice}$"):
        train(small_recipe(updates=6, evaluate_every=2), old_run, resume=True)
    assert {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()} == before
    # the newest checkpoint is converted where there is no model
    shutil.rmtree(old_run / "model")
    newest = old_run / "checkpoints" / "checkpoint-4"
    with pytest.raises(InputError, match=f"{told}.*relpos convert {newest} --out"):
        train(small_recipe(updates=4, evaluate_every=2), old_run, resume=True)
    out = convert_model(newest, tmp_path / "new")
    assert (out / "recipe.yaml").read_text() == (old_run / "recipe.yaml").read_text()
    assert "relpos translate FOLDER" in (out / "README.md").read_text()
    assert not (out / "optimizer.pt").exists()


def test_a_finished_run_of_format_1_translates_and_is_not_trained_again(old_run, small_recipe) -> None:
    recipe = small_recipe(updates=4, evaluate_every=2)
    assert train(recipe, old_run, resume=True) == old_run / "model"
    assert read_header(old_run / "model").is_old
    assert len(Translator.load(old_run).translate(["one two"])) == 1


def test_a_damaged_newest_checkpoint_hides_no_old_one(old_run, small_recipe) -> None:
    (old_run / "checkpoints" / "checkpoint-4" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"checkpoint-2: its model must have format 2"):
        train(small_recipe(updates=6, evaluate_every=2), old_run, resume=True)


def test_an_experiment_with_a_run_of_format_1_is_refused_before_others_are_trained(
    old_run, small_file, tmp_path, monkeypatch
) -> None:
    recipe = str(small_file(updates=4, evaluate_every=2))
    tasks = [{"name": name, "title": name, "recipe": recipe} for name in ("first", "second")]
    experiment = Experiment(title="Small", tasks=tasks, variants={"relative": {}})
    with working_in(tmp_path / "out", "experiment"):
        shutil.copytree(old_run, tmp_path / "out" / "second" / "relative")
    shutil.rmtree(tmp_path / "out" / "second" / "relative" / "model")
    monkeypatch.setattr(experiments, "train", lambda *_, **__: pytest.fail("a run was trained"))
    with pytest.raises(InputError, match=r"second/relative/.*checkpoint-4: its model must have format 2"):
        run_experiment(experiment, tmp_path / "out")


def test_weights_of_format_1_are_averaged_with_those_of_the_present_one(old, tmp_path) -> None:
    folder = old()
    new = convert_model(folder, tmp_path / "new")
    averaged = average_weights([folder, new])
    for name, weight in load_file(new / "model.safetensors").items():
        assert torch.equal(averaged[name], weight.float()), name


def test_a_folder_changed_after_it_was_sealed_is_converted_with_a_warning(old, tmp_path) -> None:
    folder = old()
    seal(folder)
    change_weights(folder, lambda w: w["shared.weight"].mul_(2))
    with pytest.warns(RelposWarning, match="no longer matches its seal"):
        verify(convert_model(folder, tmp_path / "new"))
