"""One training step of the translator, with relative positions and with sinusoidal ones.

    python benchmarks/translator_step.py --threads 2 --json benchmarks/results/translator_step.jsonl

The variants take turns at the same batch in one process, in a random order; a step is forward, loss, backward
and AdamW. They differ in positions and in the function that computes attention only; dropout is the same.
Ratios are to the first variant. --profile prints the operators that take most of a step.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import relpos.nn._core
from harness import Plan, measure_steps
from records import append, count, make_parser, parse, share
from relpos import relative_attention
from relpos.cli import keep_memory
from relpos.translation.model import RelposConfig, RelposForConditionalGeneration
from table import head, show

Attention = Callable[..., Tensor]
# the variant that has a bound on its ratio
BOUNDED, BOUND = "relative, relpos", 1.02
COLUMNS = ("side", "is_met")
# fields of a record that are options too
SIZES = {"d_model": 512, "layers": 6, "heads": 8, "d_ff": 1024, "vocabulary": 32_768}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def by_sdpa(*tensors: Tensor | None, backend: str | None = None, **given: Any) -> Tensor:
    """torch's attention in place of `relative_attention`, unchecked; relpos's if there are tables."""
    if len(tensors) > 3 and any(x is not None for x in tensors[3:]):
        return relative_attention(*tensors, **given)
    # it refuses is_causal beside a mask; no layer of the translator has both in training
    names = ("attn_mask", "is_causal", "dropout_p")
    return F.scaled_dot_product_attention(*tensors[:3], **{x: given[x] for x in names if x in given})


def by_nothing(query: Tensor, key: Tensor, value: Tensor, *others: Any, **given: Any) -> Tensor:
    """Means in place of attention: a step with it costs everything but attention."""
    return query + key.mean(2, keepdim=True) + value.mean(2, keepdim=True)


class Variant(NamedTuple):
    """Positions of the model, and the function that computes its attention."""

    positions: str
    attention: Attention


# the others are compared with the first
VARIANTS = {
    "sinusoidal, sdpa": Variant("sinusoidal", by_sdpa),
    "sinusoidal, relpos": Variant("sinusoidal", relative_attention),
    "relative, relpos": Variant("relative", relative_attention),
    # cross-attention has no positions: this one differs from the first in self-attention only
    "relative, cross-attention by sdpa": Variant("relative", by_sdpa),
    "relative, dense": Variant("relative", partial(relative_attention, backend="dense")),
    "relative per head, relpos": Variant("relative per head", relative_attention),
    "sinusoidal, no attention": Variant("sinusoidal", by_nothing),
}
POSITIONS: dict[str, dict[str, Any]] = {
    "sinusoidal": {"absolute_positions": "sinusoidal", "relative_max_distance": None},
    "relative": {"relative_max_distance": 16},
    "relative per head": {"relative_max_distance": 16, "relative_per_head": True},
}


class Trained(NamedTuple):
    """A model and its optimiser."""

    model: RelposForConditionalGeneration
    optimiser: torch.optim.Optimizer


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and append a line for each variant to --json."""
    options = parse(make_options(), arguments)
    first = next(iter(VARIANTS))
    names = list(dict.fromkeys([first, *options.variants]))
    keep_memory()
    batch = make_batch(options.tokens, options.shortest, options.longest, options.vocabulary)
    trained = {x: make_model(x, options) for x in dict.fromkeys(VARIANTS[name].positions for name in names)}
    steps = {name: partial(step, trained[VARIANTS[name].positions], VARIANTS[name], batch) for name in names}
    start = {"what": "translator_step", **{x: getattr(options, x) for x in (*SIZES, *DROPOUTS)}}
    start["target_tokens"] = int((batch["labels"] != -100).sum())
    start["source_tokens"] = int(batch["attention_mask"].sum())
    start["batch"] = list(batch["labels"].shape)
    print(*head(COLUMNS), sep="\n", flush=True)
    plan = Plan(options.turns, options.seconds, threads=options.threads)
    for record in measure_steps(steps, plan, start, against=first, shortest=0.0):
        is_bounded = record["side"] == BOUNDED
        record["bound"] = BOUND if is_bounded else None
        record["is_met"] = record["ratio_to"][first] <= BOUND if is_bounded else None
        append(options.json, record)
        print(show(record, COLUMNS))
    for name in names if options.profile else ():
        with profile(activities=[ProfilerActivity.CPU]) as found:
            steps[name]()
        table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15)
        print(f"\n{name}\n{table}", flush=True)


def make_model(positions: str, options: argparse.Namespace) -> Trained:
    """The translator with these positions and random weights, in training mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": options.vocabulary, "d_model": options.d_model, "d_ff": options.d_ff}
    sizes |= {"encoder_layers": options.layers, "decoder_layers": options.layers, "num_heads": options.heads}
    dropouts = {name: getattr(options, name) for name in DROPOUTS}
    config = RelposConfig(**sizes, **dropouts, **POSITIONS[positions])
    model = RelposForConditionalGeneration(config).train()
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def make_batch(tokens: int, shortest: int, longest: int, vocabulary: int) -> dict[str, Tensor]:
    """Pairs of random sentences with `tokens` target tokens, and about as many of the source.

    Returns:
        input_ids and attention_mask [batch, source], labels [batch, target], -100 where there is no token.
    """
    chance = random.Random(0)
    targets: list[int] = []
    while sum(targets) < tokens:
        targets.append(min(chance.randint(shortest, longest), tokens - sum(targets)))
    sources = [chance.randint(shortest, longest) for _ in targets]

    def padded(lengths: list[int], filler: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
        is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return ids.masked_fill(~is_token, filler), is_token

    input_ids, is_token = padded(sources, 0)
    return {"input_ids": input_ids, "attention_mask": is_token.long(), "labels": padded(targets, -100)[0]}


def step(trained: Trained, variant: Variant, batch: dict[str, Tensor]) -> None:
    """One update."""
    with attending_by(variant.attention):
        trained.model(**batch).loss.backward()
    trained.optimiser.step()
    trained.optimiser.zero_grad()


@contextmanager
def attending_by(attention: Attention) -> Iterator[None]:
    """Every attention of the translator's model by this function."""
    with mock.patch.object(relpos.nn._core, "relative_attention", attention):
        yield


def make_options() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = make_parser(__doc__, turns=15, seconds=900.0)
    add = parser.add_argument
    names = list(VARIANTS)
    add("--variants", nargs="+", choices=names, default=names, help=f"{names[0]!r} always runs")
    add("--tokens", type=count, default=2048, help="of the targets in a batch")
    for name, default in {"shortest": 25, "longest": 30}.items():
        add(f"--{name}", type=count, default=default, help="tokens of a sentence")
    for name, default in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=count, default=default)
    for name in DROPOUTS:
        add(f"--{name.replace('_', '-')}", type=share, default=0.1)
    add("--profile", action="store_true", help="print the operators that take most of a step")
    return parser


if __name__ == "__main__":
    main()
