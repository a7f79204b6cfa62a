"""Training speed beside transformers' MarianMTModel: same sizes, batches and optimiser, in turns.

    python benchmarks/training.py --json benchmarks/results/training.jsonl

Three models take turns at the same batch of random sentences: relpos with relative positions, relpos with
sinusoidal ones, and Marian (sinusoidal, torch's scaled_dot_product_attention). A turn is one training step:
forward, loss, backward and AdamW, in float32 or under autocast to bfloat16.
"""

import argparse
from functools import partial

import torch
from transformers import MarianConfig, MarianMTModel
from transformers import logging as transformers_logging

from harness import Plan, measure_steps
from records import Record, append, count, make_parser, parse
from relpos import relative_attention
from relpos.cli import keep_memory
from table import head, show
from translator_step import DROPOUTS, Trained, Variant, make_batch, make_model, step

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
    add("--tokens", type=count, default=4096, help="of the targets in a batch")
    add("--vocabulary", type=count, default=5000, help="rows of the embeddings")
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
    batch = make_batch(options.tokens, 20, 30, options.vocabulary)
    tokens = int((batch["labels"] != -100).sum())
    variant = Variant("", relative_attention)

    def run(trained: Trained) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            step(trained, variant, batch)

    models = make_models(SIZES[name], options.vocabulary)
    start = {"what": "training", "size": name, **SIZES[name], "precision": precision}
    start |= {"vocabulary": options.vocabulary, "target_tokens": tokens}
    plan = Plan(options.turns, options.seconds, threads=options.threads)
    steps = {kind: partial(run, trained) for kind, trained in models.items()}
    records = measure_steps(steps, plan, start, against="marian", shortest=0.0)
    return [x | {"target_tokens_per_second": round(tokens / x["seconds"])} for x in records]


def make_models(size: dict[str, int], vocabulary: int) -> dict[str, Trained]:
    """The three models, in training mode, with dropout 0.1 everywhere."""
    dropouts = dict.fromkeys(DROPOUTS, 0.1)
    options = argparse.Namespace(**size, **dropouts, vocabulary=vocabulary)
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=size["d_model"],
        **{f"{x}_layers": size["layers"] for x in ("encoder", "decoder")},
        **{f"{x}_attention_heads": size["heads"] for x in ("encoder", "decoder")},
        **{f"{x}_ffn_dim": size["d_ff"] for x in ("encoder", "decoder")},
        **{f"{x}_token_id": 0 for x in ("pad", "eos", "decoder_start")},
        activation_function="relu",
        forced_eos_token_id=None,
        **dropouts,
    )
    marian = MarianMTModel(config).train()
    return {
        **{name: make_model(name, options) for name in ("relative", "sinusoidal")},
        "marian": Trained(marian, torch.optim.AdamW(marian.parameters(), lr=1e-4, fused=True)),
    }


if __name__ == "__main__":
    main()
