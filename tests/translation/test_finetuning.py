"""Fine-tuning as the example and the page show it: it learns, and what it saves is a model of relpos."""

import importlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from relpos.cli import run
from relpos.translation.config import RelposConfig
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import train_tokenizer

# transformers asks torch for pinned memory, which there is none of without a GPU; PEFT asks by an older name
pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument:UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning"
)

ROOT = Path(__file__).parents[2]
WORDS = ("null", "eins", "zwei", "drei", "vier")
PAIRS = [(f"{i} {j}", f"{WORDS[i]} {WORDS[j]}") for i in range(5) for j in range(5)]
Tune = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 292)
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 128, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    torch.manual_seed(0)
    model = RelposForConditionalGeneration(RelposConfig(**sizes, vocab_size=len(tokenizer)))
    # a limit, as `relpos train` sets it
    model.generation_config.max_new_tokens = 20
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tune(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run the example, and return the folder of the tuned model."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("finetune")

    def call(*options: str, lines: list[str] | None = None) -> Path:
        text = "\n".join("\t".join(pair) for pair in 2 * PAIRS) if lines is None else "\n".join(lines)
        (tmp_path / "pairs.tsv").write_text(text + "\n", encoding="utf-8")
        example.main([str(base), str(tmp_path / "pairs.tsv"), str(tmp_path / "tuned"), *options])
        return tmp_path / "tuned"

    return call


def test_the_tuned_model_has_learned_and_the_command_translates_with_it(tune, capsys, monkeypatch) -> None:
    folder = tune("--epochs", "25", "--learning-rate", "0.005", "--line", "3 4")
    assert capsys.readouterr().out.splitlines()[-1] == "drei vier"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"3 4\n1 0\n"), encoding="utf-8"))
    assert run(["translate", str(folder)]) == 0
    out, errors = capsys.readouterr()
    assert (out, errors) == ("drei vier\neins null\n", "")


def test_merged_adapters_change_the_projections_alone(tune, base) -> None:
    folder = tune("--epochs", "2", "--learning-rate", "0.02", "--lora", "4")
    before, after = (load_file(place / "model.safetensors") for place in (base, folder))
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    parts = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    assert changed == {name for name in before if name.removesuffix(".weight").endswith(parts)}


@pytest.mark.parametrize("line", ["only a source", "source\ttarget\tmore"])
def test_a_line_that_is_no_pair_is_refused_by_its_number(tune, line) -> None:
    count = line.count("\t") + 1
    with pytest.raises(SystemExit, match=rf"line 2: must be source, tab, target; got {count} columns"):
        tune(lines=["1\teins", line])


def test_a_folder_that_exists_is_left_alone(tune, tmp_path, capsys) -> None:
    (tmp_path / "tuned").mkdir()
    with pytest.raises(SystemExit, match="2"):
        tune()
    assert "argument out" in capsys.readouterr().err
    assert not list((tmp_path / "tuned").iterdir())


def test_functions_of_the_page_tune_adapt_merge_and_translate(base, tmp_path) -> None:
    page = (ROOT / "docs" / "translator.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "translator.md", "exec"), names)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    settings = {"use_cpu": True, "disable_tqdm": True, "learning_rate": 0.005}
    given = {"per_device_train_batch_size": 5, "num_train_epochs": 20}
    names["fine_tune"](model, tokenizer, PAIRS, str(tmp_path / "tuned"), **settings, **given)
    assert names["translate"]("3 4", tmp_path / "tuned") == ["drei vier"]
    # an adapter of a few updates, merged into a fresh copy
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned")
    adapted = names["with_lora"](tuned, 4)
    trainer = names["fine_tune"](adapted, tokenizer, PAIRS, str(tmp_path / "lora"), max_steps=3, **settings)
    fresh = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned")
    merged = names["load_merged"](fresh, tmp_path / "lora").eval()
    assert isinstance(merged, RelposForConditionalGeneration)
    batch = tokenizer(["3 4", "1 0"], return_tensors="pt")
    batch["labels"] = tokenizer(["drei vier", "eins null"], return_tensors="pt", padding=True).input_ids
    true = trainer.model.eval()(**batch).logits
    torch.testing.assert_close(merged(**batch).logits, true, atol=1e-4, rtol=0)
    untouched = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned").eval()
    assert (untouched(**batch).logits - true).abs().max() > 0.01
