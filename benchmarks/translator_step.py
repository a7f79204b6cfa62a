"""One training step of the translator, with relative positions and with sinusoidal ones.

    python benchmarks/translator_step.py --threads 2 --json benchmarks/results/translator_step.jsonl

The variants take turns at the same batch in one process, in a random order; a step is forward, loss, backward
and AdamW. They differ in positions and in what computes attention, in nothing else: all dropout is the same.
`ratio` is the median of the ratios to the first variant in the same turn. --profile says where the time of a
step goes.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import relpos.nn._attention
from measuring import FEWEST_TURNS, ratio
from records import append, circumstances, count, seconds, share, writable
from relpos import relative_attention
from relpos.cli import keep_memory
from relpos.translation.model import RelposConfig, RelposForConditionalGeneration
from step_profile import profile

Attention = Callable[..., Tensor]
# the variant that has a bound on its ratio
BOUNDED, BOUND = "relative, relpos", 1.02
COLUMNS = "{:34}  {:>10}  {:>7}  {:>14}"


def by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    query_start: int | None = None,
    max_distance: Any = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """torch's attention in the place of `relative_attention`, unchecked; relpos where there are tables."""
    if rel_k is not None or rel_v is not None:
        return relative_attention(
            query,
            key,
            value,
            rel_k,
            rel_v,
            attn_mask=attn_mask,
            query_start=query_start,
            max_distance=max_distance,
            is_causal=is_causal,
            dropout_p=dropout_p,
        )
    # is_causal beside a mask is an error, and none of the translator's layers has both in training
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal
    )


def by_nothing(query: Tensor, key: Tensor, value: Tensor, *others: Any, **keywords: Any) -> Tensor:
    """Means in the place of attention: a step with it is what all but attention costs."""
    return query + key.mean(2, keepdim=True) + value.mean(2, keepdim=True)


class Variant(NamedTuple):
    """Which model, and what computes its attention."""

    positions: str
    attention: Attention


# the first is what the others are held against
VARIANTS = {
    "sinusoidal, sdpa": Variant("sinusoidal", by_sdpa),
    "sinusoidal, relpos": Variant("sinusoidal", relative_attention),
    "relative, relpos": Variant("relative", relative_attention),
    # cross-attention has no positions: this one differs from the first in self-attention alone
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
    """Measure, print a table and append a line of JSON for each variant to --json."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys([next(iter(VARIANTS)), *options.variants]))
    torch.set_num_threads(options.threads)
    writable(parser, options.json)
    keep_memory()
    batch = make_batch(options.tokens, options.shortest, options.longest, options.vocabulary)
    trained = {x: make_model(x, options) for x in dict.fromkeys(VARIANTS[name].positions for name in names)}
    steps = {name: partial(step, trained[VARIANTS[name].positions], VARIANTS[name], batch) for name in names}
    print(COLUMNS.format("variant", "step", "ratio", "quartiles"), flush=True)
    taken = take_turns(steps, options.turns, options.seconds)
    for name in names:
        record = _record(name, taken, batch, options)
        low, high = record["ratio_quartiles"]
        values = (f"{record['seconds']:.3f} s", f"{record['ratio']:.3f}", f"{low} to {high}")
        print(COLUMNS.format(name, *values))
        append(options.json, record)
        if record["is_met"] is not None:
            print(f"{'':34}  the bound {BOUND} is {'met' if record['is_met'] else 'missed'}")
    if options.profile:
        for name in names:
            print(f"\n{name}\n{profile(steps[name])}", flush=True)


def make_model(positions: str, options: argparse.Namespace) -> Trained:
    """The translator with these positions and random weights, in training mode."""
    torch.manual_seed(0)
    config = RelposConfig(
        vocab_size=options.vocabulary,
        d_model=options.d_model,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        num_heads=options.heads,
        d_ff=options.d_ff,
        dropout=options.dropout,
        attention_dropout=options.attention_dropout,
        activation_dropout=options.activation_dropout,
        **POSITIONS[positions],
    )
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
    with _attending_by(variant.attention):
        trained.model(**batch).loss.backward()
    trained.optimiser.step()
    trained.optimiser.zero_grad()


@contextmanager
def _attending_by(attention: Attention) -> Iterator[None]:
    """Every attention of relpos.nn by this function."""
    with mock.patch.object(relpos.nn._attention, "relative_attention", attention):
        yield


def take_turns(steps: dict[str, Callable[[], None]], turns: int, limit: float) -> dict[str, list[float]]:
    """Seconds of each step and turn; within a turn they run in a random order, and the first turn warms up.

    Args:
        turns: at most; fewer, though not below FEWEST_TURNS, where they take longer than `limit` seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    for turn in range(turns + 1):
        if turn > FEWEST_TURNS and time.perf_counter() - began > limit:
            break
        print(f"turn {turn} of {turns}", file=sys.stderr, flush=True)
        for name in random.Random(turn).sample(sorted(steps), len(steps)):
            started = time.perf_counter()
            steps[name]()
            found[name].append(time.perf_counter() - started)
    return {name: taken[1:] for name, taken in found.items()}


def _record(
    name: str, taken: dict[str, list[float]], batch: dict[str, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    names = ("d_model", "layers", "heads", "d_ff", "vocabulary")
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    found = ratio(taken[name], next(iter(taken.values())))
    return {
        "variant": name,
        "seconds": statistics.median(taken[name]),
        **found,
        "bound": BOUND if name == BOUNDED else None,
        "is_met": found["ratio"] <= BOUND if name == BOUNDED else None,
        "turns": len(taken[name]),
        **{x: getattr(options, x) for x in names + dropouts},
        "target_tokens": int((batch["labels"] != -100).sum()),
        "source_tokens": int(batch["attention_mask"].sum()),
        "batch": list(batch["labels"].shape),
        **circumstances("cpu", options.threads),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    names = list(VARIANTS)
    add("--variants", nargs="+", choices=names, default=names, help=f"{names[0]!r} always runs")
    add("--tokens", type=count, default=2048, help="of the targets in a batch")
    add("--shortest", type=count, default=25, help="tokens of a sentence")
    add("--longest", type=count, default=30, help="tokens of a sentence")
    add("--vocabulary", type=count, default=32_768, help="rows of the embeddings")
    add("--d-model", type=count, default=512)
    add("--layers", type=count, default=6, help="of the encoder, and of the decoder")
    add("--heads", type=count, default=8)
    add("--d-ff", type=count, default=1024, help="width of the feed-forward networks")
    add("--dropout", type=share, default=0.1)
    add("--attention-dropout", type=share, default=0.1)
    add("--activation-dropout", type=share, default=0.1)
    add("--turns", type=count, default=15, help="of each variant")
    add("--seconds", type=seconds, default=900.0, help="fewer turns beyond that")
    add("--threads", type=count, default=torch.get_num_threads())
    add("--profile", action="store_true", help="where the time of a step goes, for each variant")
    add("--json", type=Path, help="append a line for each variant", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
