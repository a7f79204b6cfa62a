"""Weights with several names: missing ones are told, and loading and resizing keep them shared."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import SIZES, model, tokens
from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM

from relpos.translation.config import RelposConfig
from relpos.translation.errors import ModelFolderError
from relpos.translation.model import RelposForConditionalGeneration, RelposModel

SHARED, SOURCE, TARGET = (
    f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
OUTPUT = "lm_head.weight"
# the names that share a weight, first the one in files
KINDS = {
    "tied": ({}, [[SHARED, SOURCE, TARGET, OUTPUT]]),
    "output of its own": (
        {"tie_word_embeddings": False, "output_bias": True},
        [[SHARED, SOURCE, TARGET], [OUTPUT]],
    ),
    "two vocabularies": ({"target_vocab_size": 50}, [[SOURCE], [TARGET, OUTPUT]]),
    "nothing shared": (
        {"target_vocab_size": 50, "tie_word_embeddings": False, "output_bias": True},
        [[SOURCE], [TARGET], [OUTPUT]],
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def logits(made: RelposForConditionalGeneration) -> Tensor:
    with torch.no_grad():
        return made(tokens(2, 5), decoder_input_ids=tokens(2, 4)).logits


def assert_shared(made: RelposForConditionalGeneration, groups: list[list[str]]) -> None:
    """Names of one group are one parameter, those of two groups are two; nothing is on meta."""
    weights = dict(made.named_parameters(remove_duplicate=False))
    assert [name for name, weight in weights.items() if weight.is_meta] == []
    for group in groups:
        assert {id(weights[name]) for name in group} == {id(weights[group[0]])}, group
    assert len({id(weights[group[0]]) for group in groups}) == len(groups)


def load(folder: Path, **options) -> RelposForConditionalGeneration:
    return RelposForConditionalGeneration.from_pretrained(folder, **options)


@kinds
def test_each_name_is_the_weight_that_it_shares(kind, tmp_path: Path) -> None:
    settings, groups = KINDS[kind]
    made = model(**settings).float()
    assert_shared(made, groups)
    made.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    # several names of one weight are saved as one
    assert [len(names & set(group)) for group in groups] == [1] * len(groups)
    loaded = load(tmp_path)
    assert_shared(loaded, groups)
    assert torch.equal(logits(loaded), logits(made))


@kinds
def test_missing_embeddings_are_told_by_every_way_of_loading(kind, tmp_path: Path) -> None:
    settings, groups = KINDS[kind]
    made = model(**settings).float()
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for group in groups:
        rest = {name: weight for name, weight in weights.items() if name not in group}
        assert len(rest) == len(weights) - 1
        save_file(rest, file, {"format": "pt"})
        for cls in (RelposForConditionalGeneration, AutoModelForSeq2SeqLM):
            with pytest.raises(ModelFolderError, match="weights missing:") as raised:
                cls.from_pretrained(tmp_path)
            assert any(name in str(raised.value) for name in group)
        ways = [
            RelposForConditionalGeneration.from_pretrained(
                None, config=made.config, state_dict=rest, output_loading_info=True
            ),
            load(tmp_path, ignore_mismatched_sizes=True, output_loading_info=True),
        ]
        for found, told in ways:
            assert set(told["missing_keys"]) == set(group)
            assert_shared(found, groups)
            assert all(weight.isfinite().all() for weight in found.parameters())
        told = RelposForConditionalGeneration(made.config).load_state_dict(rest, strict=False)
        assert set(told.missing_keys) >= {name for name in group if name not in made.all_tied_weights_keys}


@kinds
def test_a_model_built_without_memory_takes_its_weights(kind) -> None:
    settings, groups = KINDS[kind]
    made = model(**settings)
    config = RelposConfig(**SIZES | settings)
    with torch.device("meta"):
        assigned, emptied = (RelposForConditionalGeneration(config).eval() for _ in range(2))
    assigned.load_state_dict(made.state_dict(), assign=True)
    emptied.double().to_empty(device="cpu").load_state_dict(made.state_dict())
    for found in (assigned, emptied):
        assert torch.equal(logits(found), logits(made))
        # both of torch's ways make a parameter of each name
        found.tie_weights()
        assert_shared(found, groups)
        assert torch.equal(logits(found), logits(made))


@pytest.mark.filterwarnings("ignore:The new embeddings will be initialized:UserWarning")
@pytest.mark.parametrize("size", [45, 36])
@kinds
def test_resizing_keeps_what_is_shared_and_every_old_score(kind, size, tmp_path: Path) -> None:
    settings, groups = KINDS[kind]
    made = model(**settings).float()
    if made.lm_head.bias is not None:
        torch.nn.init.normal_(made.lm_head.bias)
    ids = tokens(2, 5) % 36
    given = {"input_ids": ids, "decoder_input_ids": ids}
    before = made(**given).logits
    returned = made.resize_token_embeddings(size, mean_resizing=False)
    after = made(**given).logits
    assert returned is made.get_input_embeddings()
    assert returned.num_embeddings == returned.weight.shape[0] == made.config.vocab_size == size
    # the target's own vocabulary stays as it was
    is_own = made.config.target_vocab_size is not None
    width = 50 if is_own else size
    assert after.shape[-1] == made.lm_head.out_features == made.config.decoder_vocab_size == width
    both = min(before.shape[-1], width)
    torch.testing.assert_close(after[..., :both], before[..., :both])
    if made.lm_head.bias is not None:
        assert made.lm_head.bias.shape == (width,)
        if width > before.shape[-1]:
            assert torch.equal(made.lm_head.bias[before.shape[-1] :], torch.zeros(5))
    assert_shared(made, groups)
    made.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(**given).logits, after)


def test_a_folder_of_the_whole_model_loads_without_its_output_layer_and_back(tmp_path: Path) -> None:
    made = model().float()
    made.save_pretrained(tmp_path / "whole")
    true = made.model(tokens(2, 5), decoder_input_ids=tokens(2, 4)).last_hidden_state
    for cls in (RelposModel, AutoModel):
        base = cls.from_pretrained(tmp_path / "whole")
        assert type(base) is RelposModel
        assert torch.equal(base(tokens(2, 5), decoder_input_ids=tokens(2, 4)).last_hidden_state, true)
    base.save_pretrained(tmp_path / "base")
    names = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert "shared.weight" in names
    assert not any(name.startswith("model.") for name in names)
    for cls in (RelposForConditionalGeneration, AutoModelForSeq2SeqLM):
        whole, told = cls.from_pretrained(tmp_path / "base", output_loading_info=True)
        assert not any(told.values()), told
        assert_shared(whole, KINDS["tied"][1])
        assert torch.equal(logits(whole), logits(made))


def test_an_output_layer_of_its_own_is_missed_in_a_folder_without_it(tmp_path: Path) -> None:
    model(tie_word_embeddings=False).float().model.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"weights missing: lm_head\.weight"):
        load(tmp_path)


@kinds
def test_shards_load_in_any_dtype(kind, tmp_path: Path) -> None:
    settings, groups = KINDS[kind]
    made = model(**settings).float()
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    whole, reduced = load(tmp_path, low_cpu_mem_usage=True), load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(whole), logits(made))
    assert {weight.dtype for weight in reduced.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(reduced), logits(made.bfloat16()))
    for loaded in (whole, reduced):
        assert_shared(loaded, groups)
