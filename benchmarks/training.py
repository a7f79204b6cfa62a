"""Training speed beside transformers' MarianMTModel: same sizes, batches and trainer, interleaved in one run.

    python benchmarks/training.py --json benchmarks/results/training.jsonl

Three models take turns at the same batches of generated number lines: relpos with relative positions, relpos
with sinusoidal ones, and Marian (sinusoidal, torch's scaled_dot_product_attention). Each turn is one training
step of `RelposTrainer`: forward, loss, backward, and the optimiser. The figure is the median over the turns.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments, set_seed
from transformers import logging as transformers_logging

from machine import commit, device_name
from relpos.cli import keep_memory
from relpos.translation.corpora import NumberLines, Source, read_corpus
from relpos.translation.model import RelposConfig, RelposForConditionalGeneration
from relpos.translation.recipe import TrainingSettings
from relpos.translation.tokenizer import train_tokenizer
from relpos.translation.trainer import RelposTrainer

SIZES = {
    "demo": {"d_model": 128, "layers": 2, "heads": 4, "d_ff": 256},
    "multi30k": {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 256},
    "base": {"d_model": 512, "layers": 6, "heads": 8, "d_ff": 1024},
}


def main() -> None:
    """Measure and print one line for each size; append them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["demo", "multi30k"])
    parser.add_argument("--tokens", type=int, default=4096, help="per batch, padding included")
    parser.add_argument("--vocabulary", type=int, default=5000, help="rows of the embeddings")
    parser.add_argument("--longest", type=int, default=4, help="numbers in the longest line")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    keep_memory()
    for name in options.sizes:
        for precision in ("float32", "bfloat16"):
            record = measure(name, precision, options)
            print(json.dumps(record))
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                with options.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")


def measure(name: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Target tokens per second of the three models, and ratios to Marian."""
    with tempfile.TemporaryDirectory() as folder:
        rows, tokenizer = _rows(Path(folder), options.longest)
        vocabulary = max(options.vocabulary, len(tokenizer))
        models = _models(SIZES[name], vocabulary, tokenizer)
        trainers = {
            kind: _trainer(model, rows, tokenizer, Path(folder) / kind, precision, options.tokens)
            for kind, model in models.items()
        }
        batches = list(trainers["relative"].get_train_dataloader())
        seconds: dict[str, list[float]] = {kind: [] for kind in models}
        tokens: list[int] = []
        for turn in range(options.turns + 3):
            batch = batches[turn % len(batches)]
            for kind in random.Random(turn).sample(sorted(models), len(models)):
                seconds[kind].append(_step(trainers[kind], dict(batch)))
            tokens.append(int((batch["labels"] != -100).sum()))
    # the first turns warm up
    speeds = {
        kind: statistics.median(t / s for t, s in zip(tokens[3:], taken[3:], strict=True))
        for kind, taken in seconds.items()
    }
    ratios = {
        f"{kind}_to_marian": statistics.median(
            m / s for m, s in zip(seconds["marian"][3:], seconds[kind][3:], strict=True)
        )
        for kind in ("relative", "sinusoidal")
    }
    return {
        "size": name,
        **SIZES[name],
        "precision": precision,
        "vocabulary": vocabulary,
        "tokens_per_batch": options.tokens,
        "mean_source_length": statistics.mean(b["input_ids"].shape[1] for b in batches),
        "turns": options.turns,
        "target_tokens_per_second": {kind: round(speed) for kind, speed in speeds.items()},
        **{kind: round(ratio, 3) for kind, ratio in ratios.items()},
        "threads": options.threads,
        "machine": platform.machine(),
        "cpu": device_name("cpu"),
        "torch": torch.__version__,
        "commit": commit(),
    }


def _rows(folder: Path, longest: int) -> tuple[datasets.Dataset, Any]:
    lines = Source(numbers=NumberLines(lines=8000, longest=longest))
    pairs = read_corpus(lines, "en", "de", folder / "cache")
    texts = (text for pair in pairs for text in (pair["source"], pair["target"]))
    tokenizer = train_tokenizer(texts, 380)

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        source, target = tokenizer(batch["source"]).input_ids, tokenizer(batch["target"]).input_ids
        lengths = [max(len(s), len(t)) for s, t in zip(source, target, strict=True)]
        return {"input_ids": source, "labels": target, "length": lengths}

    return pairs.map(encode, batched=True, remove_columns=pairs.column_names), tokenizer


def _models(size: dict[str, int], vocabulary: int, tokenizer: Any) -> dict[str, Any]:
    set_seed(0)
    dropout = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    marks = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
        "vocab_size": vocabulary,
        "d_model": size["d_model"],
        "encoder_layers": size["layers"],
        "decoder_layers": size["layers"],
    }
    ours = {"num_heads": size["heads"], "d_ff": size["d_ff"], "label_smoothing": 0.0, **marks, **dropout}
    marian = MarianConfig(
        encoder_attention_heads=size["heads"],
        decoder_attention_heads=size["heads"],
        encoder_ffn_dim=size["d_ff"],
        decoder_ffn_dim=size["d_ff"],
        activation_function="relu",
        forced_eos_token_id=None,
        **marks,
        **dropout,
    )
    return {
        "relative": RelposForConditionalGeneration(RelposConfig(**ours)),
        "sinusoidal": RelposForConditionalGeneration(
            RelposConfig(**ours, relative_max_distance=None, absolute_positions="sinusoidal")
        ),
        "marian": MarianMTModel(marian),
    }


def _trainer(
    model: Any, rows: datasets.Dataset, tokenizer: Any, out: Path, precision: str, tokens: int
) -> RelposTrainer:
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(out),
        max_steps=1000,
        learning_rate=1e-4,
        bf16=precision == "bfloat16",
        use_cpu=not torch.accelerator.is_available(),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    out.mkdir()
    settings = TrainingSettings(tokens_per_batch=tokens)
    trainer = RelposTrainer(model, arguments, rows, rows, tokenizer, settings, out / "metrics.jsonl", [])
    trainer.create_optimizer_and_scheduler(1000)
    trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model_wrapped.train()
    return trainer


def _step(trainer: RelposTrainer, batch: dict[str, torch.Tensor]) -> float:
    started = time.perf_counter()
    trainer.training_step(trainer.model_wrapped, batch, num_items_in_batch=(batch["labels"] != -100).sum())
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
