"""Folders of strangers: data, which choose no code, take no memory without bound, and end in no traceback."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_checkpoints import VOCABULARY, change_config, change_weights, refusal, small_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from relpos.cli import run
from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError, ModelFolderError, RelposWarning, UsageError
from relpos.translation.generation import Search, Translator
from relpos.translation.loading import load_model
from relpos.translation.model import RelposForConditionalGeneration

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def foreign(whole, tmp_path) -> Path:
    """A copy without a seal, to be made a stranger's."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / "seal.json").unlink()
    return folder


def change(folder: Path, name: str, **values) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"attn_implementation": "someone/kernel@main"}, "attn_implementation must be one of"),
        ({"experts_implementation": "someone/kernel"}, "experts_implementation must be one of"),
        ({"num_labels": 10**9}, r"num_labels must be .* to 1,000, or null; got 1000000000\."),
        (
            {"absolute_positions": "rotary"},
            "absolute_positions must be one of .*'sinusoidal'.*; got 'rotary'",
        ),
        ({"activation": "tanh"}, "activation must be one of .*'gelu'.*; got 'tanh'"),
        ({"num_heads": 3}, "num_heads must divide d_model = 512; got 3"),
        ({"num_heads": 0}, "num_heads must be a whole number from 1 to 1,048,576; got 0"),
        ({"relative_max_distance": -1}, "relative_max_distance must be at least 0; got -1"),
        ({"relative_max_distance": [2, -1]}, r"relative_max_distance must be at least 0; got \[2, -1\]"),
        ({"encoder_layers": 10**6}, r"encoder_layers must be a whole number from 1 to 1,000; got 1000000\."),
        ({"vocab_size": 2**20 + 1}, r"vocab_size must be a whole number from 1 to 1,048,576; got 1048577\."),
        ({"relative_max_distance": 2**20 + 1}, r"relative_max_distance must be at most 1,048,576"),
        ({"norm_first": "no"}, r"norm_first must be true or false; got 'no'\."),
        ({"relative_keys": 1}, r"relative_keys must be true or false; got 1\."),
        ({"num_heads": True}, r"num_heads must be a whole number"),
        ({"pad_token_id": -5}, rf"pad_token_id must be a whole number from 0 to {VOCABULARY - 1}; got -5\."),
        ({"eos_token_id": None}, r"eos_token_id must be a whole number"),
        ({"eos_token_id": [2, VOCABULARY]}, r"eos_token_id must be .* or a list of 1 to 100 values"),
        ({"decoder_start_token_id": VOCABULARY}, r"decoder_start_token_id must be a whole number"),
        ({"dropout": "x"}, r"dropout must be a number from 0 to 1; got 'x'\."),
        ({"dropout": float("nan")}, r"dropout must be a number from 0 to 1; got nan\."),
        ({"label_smoothing": 1.5}, r"label_smoothing must be a number from 0 to 1; got 1\.5\."),
        ({"dtype": "load"}, r"dtype must be null or one of .*float16.*; got 'load'\."),
        ({"torch_dtype": "int8"}, r"torch_dtype must be null or one of"),
        ({"is_encoder_decoder": False}, r"is_encoder_decoder must be True; got False\."),
        ({"output_attentions": 1}, r"output_attentions must be true or false, or null; got 1\."),
        ({"return_dict": "yes"}, r"return_dict must be true or false, or null; got 'yes'\."),
        ({"use_cache": 0}, r"use_cache must be true or false, or null; got 0\."),
        ({"attn_implementation": "flash_attention_2"}, r"'eager', 'sdpa'\); got 'flash_attention_2'\."),
        ({"attn_implementation": {"encoder": "sdpa"}}, r"attn_implementation must be one of .*'encoder'"),
        ({"layer_norm_eps": -1e-9}, r"layer_norm_eps must be a number from 0 to 1; got -1e-09\."),
        ({"layer_norm_eps": 1.001}, r"layer_norm_eps must be a number from 0 to 1; got 1\.001\."),
        ({"layer_norm_eps": True}, r"layer_norm_eps must be a number from 0 to 1; got True\."),
        ({"layer_norm_eps": "1e-5"}, r"layer_norm_eps must be a number from 0 to 1; got '1e-5'\."),
        ({"output_bias": 1}, r"output_bias must be true or false; got 1\."),
        ({"target_vocab_size": 0}, r"target_vocab_size must be a whole number from 1 to 1,048,576, or null"),
        ({"target_vocab_size": 2**20 + 1}, r"target_vocab_size must be .* to 1,048,576, .*; got 1048577\."),
        ({"target_vocab_size": 5.0}, r"target_vocab_size must be a whole number .*; got 5\.0\."),
        ({"relative_tied": 0}, r"relative_tied must be true or false; got 0\."),
        (
            {"relative_tied": True, "relative_values": False},
            "relative_tied must be False unless relative_keys and relative_values are True; got True",
        ),
        (
            {"relative_tied": True, "relative_keys": False},
            "relative_tied must be False unless relative_keys and relative_values are True; got True",
        ),
        ({"id2label": {"a": "b"} | dict.fromkeys(map(str, range(1001)), "x")}, r"id2label must be an object"),
        ({"model_type": "bert"}, r"model_type must be 'relpos'"),
        ({"format": 10**5000}, r"format must be at most 2; got a value of int that is too long to show"),
    ],
)
def test_a_setting_outside_its_type_or_bounds_is_refused_by_name(values, told) -> None:
    with pytest.raises(ValueError, match=told):
        RelposConfig(**{"vocab_size": VOCABULARY} | values)


@pytest.mark.parametrize("kind", ["relpos", "eager", "sdpa", None])
def test_kinds_of_attention_that_choose_no_code_may_be_in_a_configuration(foreign, kind) -> None:
    change_config(foreign, attn_implementation=kind)
    if kind == "sdpa":
        # the model has relative positions
        assert 'attn_implementation must be "relpos" or "eager"' in refusal(foreign)
        small_model(relative_keys=False, relative_values=False).save_pretrained(foreign)
        change_config(foreign, attn_implementation=kind)
    assert load_model(foreign)[0].config._attn_implementation == (kind or "relpos")


@pytest.mark.parametrize(
    "values", [{"output_attentions": True, "output_hidden_states": True}, {"use_cache": False}]
)
def test_outputs_that_a_configuration_asks_for_do_not_hinder_translation(foreign, values) -> None:
    true = Translator.load(foreign).translate(["red cat"])
    change_config(foreign, **values)
    found = Translator.load(foreign)
    assert found.translate(["red cat"])[0][0].text == true[0][0].text
    assert isinstance(found.model.generate(torch.tensor([[5, 6, 2]]), max_new_tokens=3), torch.Tensor)


def test_a_setting_refused_is_refused_through_the_auto_classes_and_the_loader(foreign, monkeypatch) -> None:
    monkeypatch.setattr(
        RelposForConditionalGeneration, "__init__", lambda *_: pytest.fail("a model was built")
    )
    change_config(foreign, attn_implementation="someone/kernel@main")
    told = "attn_implementation must be one of"
    for load in (AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained):
        with pytest.raises(ValueError, match=told):
            load(foreign)
    assert f"{foreign / 'config.json'}: {told}" in refusal(foreign)


def test_unknown_settings_are_ignored_with_one_warning(foreign) -> None:
    change_config(foreign, quantization_config={"quant_method": "x"}, auto_map={"AutoModel": "a--b.C"}, new=3)
    with pytest.warns(RelposWarning, match="ignored: quantization_config, auto_map, new") as caught:
        model, _ = load_model(foreign)
    assert len(caught) == 1
    assert not any(hasattr(model.config, name) for name in ("quantization_config", "auto_map", "new"))


def test_a_configuration_comes_back_without_a_warning(tmp_path) -> None:
    given = RelposConfig(vocab_size=50, hidden_size=16, num_labels=3, relative_max_distance=[3, 1], dropout=0)
    given.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == given.to_dict()
    assert RelposConfig(**given.to_dict()).to_dict() == given.to_dict()
    assert given.d_model == 16


def test_settings_that_a_caller_changes_are_checked_and_kept(foreign) -> None:
    assert RelposForConditionalGeneration.from_pretrained(foreign, dropout=0.5).config.dropout == 0.5
    assert AutoModelForSeq2SeqLM.from_pretrained(foreign, dropout=0.5).config.dropout == 0.5
    for load in (RelposForConditionalGeneration.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained):
        assert load(foreign, dtype=torch.float16).dtype == torch.float16
        with pytest.raises(ValueError, match="dropout must be a number"):
            load(foreign, dropout=2)


SIZES = [{"encoder_layers": 1000}, {"vocab_size": 2**20}, {"d_model": 2**20, "d_ff": 2**20}]


@pytest.mark.parametrize("values", SIZES)
def test_sizes_that_the_weights_have_not_are_told_before_memory_is_taken(
    foreign, monkeypatch, values
) -> None:
    built = []
    real = RelposForConditionalGeneration.__init__

    def build(self, config) -> None:
        built.append((config.encoder_layers, torch.empty(0).device.type))
        real(self, config)

    monkeypatch.setattr(RelposForConditionalGeneration, "__init__", build)
    change_config(foreign, **values)
    assert "does not fit its config.json; weights " in refusal(foreign)
    with pytest.raises(ValueError, match=r"does not fit its config\.json"):
        AutoModelForSeq2SeqLM.from_pretrained(foreign)
    # one layer without memory tells the sizes of all
    assert set(built) == {(1, "meta")}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_finite_are_refused(foreign, value, dtype) -> None:
    def spoil(found: dict[str, torch.Tensor]) -> None:
        for name in found:
            found[name] = found[name].to(dtype)
        found["model.decoder.layers.0.fc2.bias"][3] = value

    change_weights(foreign, spoil)
    told = refusal(foreign)
    assert "not finite (NaN or infinite): model.decoder.layers.0.fc2.bias; the training diverged" in told
    with pytest.raises(ValueError, match="not finite"):
        AutoModelForSeq2SeqLM.from_pretrained(foreign)


def test_finite_weights_load_though_their_sum_is_infinite(foreign) -> None:
    change_weights(foreign, lambda found: found["model.shared.weight"].fill_(3e38))
    assert load_model(foreign)[0].model.shared.weight.max() == 3e38


def test_weights_of_integers_are_refused(foreign) -> None:
    change_weights(
        foreign, lambda found: found.update({"model.shared.weight": found["model.shared.weight"].int()})
    )
    assert (
        "the type of weights must be one of ('F64', 'F32', 'F16', 'BF16'); got others in model.shared.weight"
        in refusal(foreign)
    )


def test_a_header_that_claims_much_is_not_read(foreign) -> None:
    (foreign / WEIGHTS).write_bytes((2**40).to_bytes(8, "little") + b"{}")
    assert "16,777,216 bytes; got 1,099,511,627,776" in refusal(foreign)


def test_a_model_can_be_saved_over_the_files_it_came_from(foreign) -> None:
    model, _ = load_model(foreign)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(foreign)
    for found in (model, load_model(foreign)[0]):
        for name, weight in found.state_dict().items():
            assert torch.equal(weight, before[name])


@pytest.fixture
def sharded(foreign) -> Path:
    (foreign / WEIGHTS).unlink()
    small_model().save_pretrained(foreign, max_shard_size="10KB")
    assert len(list(foreign.glob("model-*.safetensors"))) > 2
    return foreign


def test_shards_load_as_one_file_does(sharded) -> None:
    for model in (load_model(sharded)[0], AutoModelForSeq2SeqLM.from_pretrained(sharded)):
        for name, weight in small_model().state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3, ["a"]])
def test_an_index_that_leaves_the_folder_is_refused(sharded, place) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.shared.weight"] = place
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"{INDEX}: weight_map must name .safetensors files in this folder; got " in refusal(sharded)


def test_shards_that_are_missing_damaged_or_of_another_model_are_told(sharded) -> None:
    shard = next(sharded.glob("model-00002-of-*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    assert f"the file {shard.name} is missing" in refusal(sharded)
    shard.write_bytes(content[:-8])
    assert f"{shard}: the weights cannot be read (" in refusal(sharded)
    shutil.copy(next(sharded.glob("model-00001-of-*.safetensors")), shard)
    assert f"{sharded / INDEX}: does not fit {shard.name} in " in refusal(sharded)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_beams", value) for value in (10**6, VOCABULARY + 1, "4", 0)),
        *(("length_penalty", value) for value in ("long", float("nan"))),
        *(("max_new_tokens", 2**20 + 1), ("eos_token_id", VOCABULARY), ("pad_token_id", "x")),
        *(("temperature", 0), ("early_stopping", "x")),
    ],
)
def test_a_setting_of_the_search_outside_its_bounds_is_told_with_file_and_key(foreign, key, value) -> None:
    change(foreign, "generation_config.json", **{key: value})
    assert f"{foreign / 'generation_config.json'}: {key} must be " in refusal(foreign)
    with pytest.raises(ValueError, match=f"generation_config.json: {key} must be "):
        AutoModelForSeq2SeqLM.from_pretrained(foreign)


def test_settings_that_choose_another_search_are_ignored_with_a_warning(foreign) -> None:
    others = {"prompt_lookup_num_tokens": 3, "num_return_sequences": 10**6, "custom_generate": "someone/code"}
    change(foreign, "generation_config.json", num_beams=3, length_penalty=0.25, **others)
    with pytest.warns(RelposWarning, match="generation_config.json: settings that relpos does not") as told:
        settings = load_model(foreign)[0].generation_config
    assert all(name in str(told[0].message) for name in others)
    assert (settings.num_beams, settings.length_penalty) == (3, 0.25)
    assert (settings.prompt_lookup_num_tokens, settings.num_return_sequences) == (None, None)
    assert not hasattr(settings, "custom_generate")


def test_without_settings_of_the_search_the_configuration_names_the_tokens(foreign) -> None:
    (foreign / "generation_config.json").unlink()
    change_config(foreign, eos_token_id=[2, 3])
    settings = load_model(foreign)[0].generation_config
    assert (settings.eos_token_id, settings.pad_token_id, settings.decoder_start_token_id) == ([2, 3], 0, 1)


def test_as_many_beams_as_subwords_work_and_one_more_is_refused(whole, capsys) -> None:
    translator = Translator.load(whole)
    assert translator.translate(["red"], Search(beams=VOCABULARY))[0][0].score < 0
    told = f"beams must be at most the model's vocabulary = {VOCABULARY}, .*; got {VOCABULARY + 1}"
    with pytest.raises(UsageError, match=told):
        translator.translate(["red"], Search(beams=VOCABULARY + 1))
    assert run(["translate", str(whole), "--beams", "100000", os.devnull]) == 2
    assert f"vocabulary = {VOCABULARY}, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"pad_token": None}, "pad_token must be a short text"),
        ({"eos_token": 3}, "eos_token must be a short text"),
        ({"padding_side": "up"}, "padding_side must be one of"),
        ({"split_special_tokens": "yes"}, "split_special_tokens must be true or false"),
        ({"model_max_length": "long"}, "model_max_length must be a number from 1 on"),
        ({"extra_special_tokens": [3]}, "extra_special_tokens must be a list"),
    ],
)
def test_a_setting_of_the_tokenizer_of_another_type_is_told(foreign, values, told) -> None:
    change(foreign, "tokenizer_config.json", **values)
    assert f"{foreign / 'tokenizer_config.json'}: {told}" in refusal(foreign)


def test_settings_of_the_tokenizer_that_name_files_or_parts_have_no_effect(foreign) -> None:
    _, true = load_model(foreign)
    others = {"tokenizer_file": "/dev/zero", "fast_tokenizer_files": ["../x.json"], "post_processor": 3}
    others |= {
        "tokenizer_padding": {"length": 10**9},
        "gguf_file": "x",
        "model_input_names": ["a"],
        "vocab": {},
    }
    change(foreign, "tokenizer_config.json", **others)
    os.mkfifo(foreign / "special_tokens_map.json")
    _, tokenizer = load_model(foreign)
    assert dict(tokenizer("red cat")) == dict(true("red cat"))
    assert tokenizer.pad({"input_ids": [[1]]}).keys() == {"input_ids", "attention_mask"}


def test_a_missing_tokenizer_config_is_told(foreign) -> None:
    (foreign / "tokenizer_config.json").unlink()
    assert "the file tokenizer_config.json is missing" in refusal(foreign)


def test_a_subword_beyond_the_embeddings_is_refused(foreign) -> None:
    model = json.loads((foreign / "tokenizer.json").read_text())["model"]
    model["vocab"]["zzz"] = 10**6
    change(foreign, "tokenizer.json", model=model)
    assert "they do not belong together" in refusal(foreign)


def test_replacements_that_multiply_a_text_are_refused(foreign) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
    change(foreign, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [double] * 3})
    assert "replacements must lengthen a text at most 4,096 times" in refusal(foreign)


def test_padding_that_a_tokenizer_brings_along_is_not_done(foreign) -> None:
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    change(foreign, "tokenizer.json", padding=padding)
    _, tokenizer = load_model(foreign)
    assert len(tokenizer("red cat").input_ids) < 20


NAMES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", WEIGHTS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "huge"])
def test_what_is_no_file_of_a_model_is_told_and_not_read(foreign, name, kind) -> None:
    path = foreign / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    refusal(foreign)


CONTENTS = ["[" * 100_000, '{"a":' * 100_000, '{"d_model": ' + "9" * 5000 + "}", "\ud800"]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", [*NAMES[:-1], "seal.json"])
def test_json_that_python_cannot_take_is_told(foreign, name, content) -> None:
    (foreign / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    refusal(foreign)


def test_a_model_of_the_hub_goes_the_same_way(foreign, tmp_path) -> None:
    cache = tmp_path / "cache" / "models--someone--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    snapshot = Path(shutil.copytree(foreign, cache / "snapshots" / ("0" * 40)))
    load = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    model = AutoModelForSeq2SeqLM.from_pretrained("someone/model", **load)
    assert torch.equal(model.model.shared.weight, small_model().model.shared.weight)
    assert model.config.name_or_path == "someone/model"
    change(snapshot, "generation_config.json", num_beams=10**6)
    with pytest.raises(ModelFolderError, match="num_beams must be"):
        AutoModelForSeq2SeqLM.from_pretrained("someone/model", **load)
    with pytest.raises(OSError, match="someone"):
        RelposForConditionalGeneration.from_pretrained("someone/other", **load)


VALUES = [
    *("null", "true", "false", '"x"', '"\\ud800"', "-5", "0", "1", "1" + "0" * 30, "0.5", "NaN", "1e999"),
    *("[]", '[1, "a", null]', "{}", '{"a": {"b": 1}}', "[" * 100 + "]" * 100),
]
HARD = ["[" * 100_000 + "]" * 100_000, "9" * 5000]
MORE = {
    "config.json": [
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("num_labels", "id2label", "label2id", "torch_dtype"),
        *("output_attentions", "output_hidden_states", "return_dict", "problem_type", "hidden_size"),
        "auto_map",
        *("quantization_config", "transformers_weights", "fusion_config", "per_layer_config", "layer_types"),
        *("configuration_files", "attribute_map", "check", "name_or_path", "rope_scaling", "num_beams"),
    ],
    "generation_config.json": [*GenerationConfig().to_dict(), "custom_generate", "assistant"],
    "tokenizer_config.json": [
        *("tokenizer_object", "tokenizer_file", "vocab", "merges", "gguf_file", "tokenizer_padding"),
        *("post_processor", "extra_special_tokens", "additional_special_tokens", "fast_tokenizer_files"),
        *("init_inputs", "chat_template", "added_tokens_decoder", "add_bos_token", "truncation_side", "zzz"),
    ],
    "seal.json": ["zzz"],
}


def _cases(whole: Path) -> Iterator[tuple[str, str]]:
    """Each file with one key changed: its name and its text."""
    for name, more in MORE.items():
        content = json.loads((whole / name).read_text())
        for key in sorted({*content, *more}):
            rest = json.dumps({other: value for other, value in content.items() if other != key})[1:-1]
            for value in [*VALUES, *HARD]:
                yield name, "{" + ", ".join(filter(None, (rest, f"{json.dumps(key)}: {value}"))) + "}"


def _try(whole: Path, folder: Path, cases: list[tuple[str, str]]) -> tuple[int, int]:
    """How many of `cases` load and how many are refused; anything else fails."""
    refused = 0
    shutil.copytree(whole, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RelposWarning)
        for name, text in cases:
            (folder / name).write_text(text)
            told = _refusal(folder)
            refused += told is not None
            assert told is None or (len(told.splitlines()) == 1 and len(told) < 1000), text[-100:]
            if name in ("config.json", "generation_config.json"):
                _try_auto_classes(folder, text)
            shutil.copy(whole / name, folder)
    return len(cases) - refused, refused


def _refusal(folder: Path) -> str | None:
    try:
        load_model(folder)
    except InputError as error:
        return str(error)
    return None


def _try_auto_classes(folder: Path, text: str) -> None:
    try:
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    except (ValueError, TypeError, OSError):
        pass
    except (RecursionError, AttributeError):
        # of AutoConfig, which reads the file before it knows whose it is
        assert "[" * 1000 in text or '"configuration_files": [' in text


def test_a_wrong_value_for_any_key_loads_or_is_refused_in_one_sentence(whole, tmp_path) -> None:
    draw = random.Random(0)
    loaded, refused = _try(whole, tmp_path / "model", draw.sample(list(_cases(whole)), 100))
    assert loaded > 20
    assert refused > 30


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_every_wrong_value_for_every_key_loads_or_is_refused_in_one_sentence(whole, tmp_path, part) -> None:
    loaded, refused = _try(whole, tmp_path / "model", list(_cases(whole))[part::12])
    assert loaded > 40
    assert refused > 80
