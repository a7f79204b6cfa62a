"""`import relpos.translation` alone registers the model; a model's folder says so, and carries no code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from relpos.translation.checkpoints import CARD, save_sealed, verify
from relpos.translation.config import RelposConfig
from relpos.translation.errors import RelposWarning
from relpos.translation.loading import load_model
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.model_card import write_card
from relpos.translation.recipe import load_recipe
from relpos.translation.tokenizer import save_tokenizer, train_tokenizer

SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "d_ff": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed model with its card, as a run leaves it."""
    tokenizer = train_tokenizer(["red green blue one two three"] * 20, 275)
    model = RelposForConditionalGeneration(RelposConfig(vocab_size=len(tokenizer), **SIZES))

    def write(draft: Path) -> None:
        model.save_pretrained(draft)
        save_tokenizer(tokenizer, draft)
        write_card(load_recipe("numbers"), draft / CARD)

    save_sealed(tmp_path / "model", write)
    return tmp_path / "model"


def in_new_process(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.parametrize("is_first", [True, False])
def test_one_import_makes_every_auto_class_know_the_model(folder, is_first) -> None:
    lines = ["import relpos.translation", "from transformers import AutoConfig, AutoModel, AutoTokenizer"]
    lines = lines if is_first else lines[::-1]
    lines += [
        "from transformers import AutoModelForSeq2SeqLM as Whole",
        "import sys",
        "for kind in (AutoConfig, AutoModel, Whole, AutoTokenizer):",
        "    print(type(kind.from_pretrained(sys.argv[1])).__name__)",
        "assert AutoTokenizer.from_pretrained(sys.argv[1])(['red']).input_ids[0][-1] == 2",
    ]
    found = in_new_process("\n".join(lines), folder).split()
    assert found[:3] == ["RelposConfig", "RelposModel", "RelposForConditionalGeneration"]
    assert len(found) == 4


def test_the_commands_help_imports_no_transformers() -> None:
    code = """
import runpy, sys
sys.argv = ["relpos", "--help"]
try:
    runpy.run_module("relpos", run_name="__main__")
except SystemExit as end:
    print("\\n", end.code, "transformers" in sys.modules)
"""
    assert in_new_process(code).splitlines()[-1].strip() == "0 False"


def test_the_import_registers_the_model_also_where_the_command_was_imported_before() -> None:
    code = "import relpos.cli, relpos.translation; from transformers import AutoConfig"
    assert in_new_process(f"{code}; print(AutoConfig.for_model('relpos').model_type)").strip() == "relpos"


def test_a_saved_folder_holds_no_code(folder) -> None:
    assert not list(folder.rglob("*.py"))
    assert "auto_map" not in json.loads((folder / "config.json").read_text())


def test_the_card_says_what_the_model_is_and_how_to_load_it(folder) -> None:
    card = ModelCard.load(folder / CARD)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "translation"
    assert card.data.language == ["en", "de"]
    assert "import relpos.translation\n" in card.text
    assert "relative positions (clip distance 16)" in card.text


def test_an_edited_card_is_no_damage_and_is_kept(folder) -> None:
    (folder / CARD).write_text("my words")
    verify(folder)
    load_model(folder)
    save_sealed(folder, lambda draft: (draft / CARD).write_text("new"))
    assert (folder / CARD).read_text() == "my words"
    (folder / CARD).unlink()
    save_sealed(folder, lambda draft: (draft / CARD).write_text("new"))
    assert (folder / CARD).read_text() == "new"
    save_sealed(folder, lambda draft: (draft / CARD).write_text("newer"))
    assert (folder / CARD).read_text() == "newer"


def test_an_edited_weight_is_still_told(folder) -> None:
    model, _ = load_model(folder)
    with torch.no_grad():
        model.model.shared.weight.add_(1)
    model.save_pretrained(folder)
    with pytest.warns(RelposWarning, match="no longer matches its seal"):
        load_model(folder)
