"""Training speed beside transformers' MarianMTModel: same sizes, batches and trainer, in turns.

    python benchmarks/training.py --json benchmarks/results/training.jsonl

Three models take turns at the same batches of generated number lines: relpos with relative positions, relpos
with sinusoidal ones, and Marian (sinusoidal, torch's scaled_dot_product_attention). Each turn is one training
step of `RelposTrainer`: forward, loss, backward, and the optimiser.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments, set_seed
from transformers import logging as transformers_logging

from harness import Plan, measure_steps
from records import Record, append, count, make_parser, parse
from relpos.cli import keep_memory
from relpos.translation.corpora import NumberLines, Source, read_corpus
from relpos.translation.model import RelposConfig, RelposForConditionalGeneration
from relpos.translation.recipe import TrainingSettings
from relpos.translation.tokenizer import train_tokenizer
from relpos.translation.trainer import RelposTrainer
from table import head, show

SIZES = {
    "demo": {"d_model": 128, "layers": 2, "heads": 4, "d_ff": 256},
    "multi30k": {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 256},
    "base": {"d_model": 512, "layers": 6, "heads": 8, "d_ff": 1024},
}
COLUMNS = ("side", "size", "precision", "target_tokens_per_second")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a row for each model, and append them to --json."""
    parser = make_parser(__doc__, turns=15, seconds=900.0)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=["demo", "multi30k"])
    add("--tokens", type=count, default=4096, help="per batch, padding included")
    add("--vocabulary", type=count, default=5000, help="rows of the embeddings")
    add("--longest", type=count, default=4, help="numbers in the longest line")
    options = parse(parser, arguments)
    transformers_logging.set_verbosity_error()
    keep_memory()
    print(*head(COLUMNS), sep="\n", flush=True)
    for name in options.sizes:
        for precision in ("float32", "bfloat16"):
            for record in measure(name, precision, options):
                append(options.json, record)
                print(show(record, COLUMNS), flush=True)


def measure(name: str, precision: str, options: argparse.Namespace) -> list[Record]:
    """A record for each model; ratios are to Marian."""
    with tempfile.TemporaryDirectory() as folder:
        rows, tokenizer = _rows(Path(folder), options.longest)
        vocabulary = max(options.vocabulary, len(tokenizer))
        trainers = {
            kind: _trainer(model, rows, tokenizer, Path(folder) / kind, precision, options.tokens)
            for kind, model in _models(SIZES[name], vocabulary, tokenizer).items()
        }
        batches = list(trainers["relative"].get_train_dataloader())
        start = {"what": "training", "size": name, **SIZES[name], "precision": precision}
        start |= {"vocabulary": vocabulary, "tokens_per_batch": options.tokens}
        start["mean_source_length"] = statistics.mean(b["input_ids"].shape[1] for b in batches)
        steps = {kind: _step(trainer, batches) for kind, trainer in trainers.items()}
        plan = Plan(options.turns, options.seconds, threads=options.threads)
        # one step a turn, so that all models see the same batch
        records = measure_steps(steps, plan, start, against=("marian",), shortest=0.0)
    tokens = statistics.mean(int((b["labels"] != -100).sum()) for b in batches)
    return [x | {"target_tokens_per_second": round(tokens / x["seconds"])} for x in records]


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
    shared = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
        "vocab_size": vocabulary,
        "d_model": size["d_model"],
        "encoder_layers": size["layers"],
        "decoder_layers": size["layers"],
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1),
    }
    ours = {"num_heads": size["heads"], "d_ff": size["d_ff"], "label_smoothing": 0.0, **shared}
    sinusoidal = RelposConfig(**ours, relative_max_distance=None, absolute_positions="sinusoidal")
    marian = MarianConfig(
        encoder_attention_heads=size["heads"],
        decoder_attention_heads=size["heads"],
        encoder_ffn_dim=size["d_ff"],
        decoder_ffn_dim=size["d_ff"],
        activation_function="relu",
        forced_eos_token_id=None,
        **shared,
    )
    return {
        "relative": RelposForConditionalGeneration(RelposConfig(**ours)),
        "sinusoidal": RelposForConditionalGeneration(sinusoidal),
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


def _step(trainer: RelposTrainer, batches: list[dict[str, torch.Tensor]]) -> Callable[[], None]:
    """One update, with the next batch at each call."""
    remaining = cycle(batches)

    def run() -> None:
        batch = dict(next(remaining))
        num_items = (batch["labels"] != -100).sum()
        trainer.training_step(trainer.model_wrapped, batch, num_items_in_batch=num_items)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    return run


if __name__ == "__main__":
    main()
