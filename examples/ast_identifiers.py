"""Which variable was it? Masked identifiers in syntax trees, with and without the relations of the tree.

In functions of the standard library some uses of variables are hidden, and a small encoder tells from the
rest which of the function's variables stood there. It is trained once for each way to label pairs of nodes,
all else equal: not at all, by distance in the source, by relation in the tree, by both. Source of the idea:
Shaw et al. 2018, section 3.1.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos import relation_attention
from relpos.relations import Relations, combine_relations, distance_relations, tree_relations
from syntax_trees import MOST_VARIABLES, NO_VARIABLE, Function, read_functions, split

D_MODEL, HEADS, LAYERS = 64, 4, 2
FUNCTIONS_PER_BATCH = 32
HIDDEN_SHARE = 0.3  # of the uses of variables
UNKNOWN, MASK = 0, 1  # the first words; then one for each variable of a function, then those of the text
FIRST_VARIABLE = 2
FIRST_WORD = FIRST_VARIABLE + MOST_VARIABLES


@dataclass(frozen=True)
class Batch:
    """Functions as tensors, [batch, nodes] where nothing else is said; padded to the longest."""

    kinds: Tensor
    words: Tensor
    variables: Tensor  # -1 where none stands
    parents: Tensor
    lengths: Tensor  # [batch], nodes


def no_labels(batch: Batch) -> Relations:
    """No pair has a relation: plain attention, which sees a bag of nodes."""
    return Relations(torch.full((1, 1), -1), ())


def distance_labels(batch: Batch) -> Relations:
    """How far the key stands after the query in the source, clipped at 8."""
    return distance_relations(batch.kinds.shape[1], max_distance=8)


def tree_labels(batch: Batch) -> Relations:
    """What the key is to the query in the tree."""
    return tree_relations(batch.parents, lengths=batch.lengths)


def ordered_tree_labels(batch: Batch) -> Relations:
    """The relation in the tree, and whether the key stands before or after: siblings have an order."""
    order = distance_relations(batch.kinds.shape[1], max_distance=1)
    return combine_relations(tree_labels(batch), order)


def both_labels(batch: Batch) -> Relations:
    """Both at once: 7 relations of the tree times 17 distances."""
    return combine_relations(tree_labels(batch), distance_labels(batch))


LABELLINGS: dict[str, Callable[[Batch], Relations]] = {
    "none": no_labels,
    "distance": distance_labels,
    "tree": tree_labels,
    "tree in order": ordered_tree_labels,
    "tree and distance": both_labels,
}


class RelationLayer(nn.Module):
    """Self-attention with a vector for each label, then a feed-forward network; pre-norm, residual."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        d_k = D_MODEL // HEADS
        self.norm, self.norm_ff = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.in_proj, self.out_proj = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.feed_forward = nn.Sequential(
            nn.Linear(D_MODEL, 2 * D_MODEL), nn.GELU(), nn.Linear(2 * D_MODEL, D_MODEL)
        )
        # a row for each label, shared over the heads
        self.rel_k, self.rel_v = (
            nn.Parameter(0.3 * torch.randn(num_labels, d_k)) if num_labels else None for _ in range(2)
        )

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """x [batch, nodes, d_model]; labels broadcastable to [batch, heads, nodes, nodes]."""
        packed = self.in_proj(self.norm(x)).unflatten(-1, (3, HEADS, D_MODEL // HEADS))
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # [batch, heads, nodes, d_k] each
        out = relation_attention(query, key, value, labels, self.rel_k, self.rel_v, key_lengths=lengths)
        x = x + self.out_proj(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_ff(x))


class Encoder(nn.Module):
    """Logits over the variables of a function, [batch, nodes, variables], for each node."""

    def __init__(self, num_kinds: int, num_words: int, num_labels: int) -> None:
        super().__init__()
        self.kinds, self.words = nn.Embedding(num_kinds, D_MODEL), nn.Embedding(num_words, D_MODEL)
        for table in (self.kinds, self.words):
            nn.init.normal_(table.weight, std=0.3)
        self.layers = nn.ModuleList(RelationLayer(num_labels) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, kinds: Tensor, words: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        x = self.kinds(kinds) + self.words(words)
        for layer in self.layers:
            x = layer(x, labels, lengths)
        # a name is recognised by the vector that shows it
        return self.norm(x) @ self.words.weight[FIRST_VARIABLE:FIRST_WORD].T


class Vocabulary:
    """Numbers for kinds of nodes and for words, from the functions of the training part."""

    def __init__(self, functions: Sequence[Function], most_words: int = 1000) -> None:
        kinds = sorted({kind for function in functions for kind in function.kinds})
        counts = Counter(word for function in functions for word in function.words)
        # by count, then by name, so that ties stand alike on every machine
        words = sorted(counts, key=lambda word: (-counts[word], word))[:most_words]
        self.kinds = {kind: number for number, kind in enumerate(kinds, 1)}
        self.words = {word: number for number, word in enumerate(words, FIRST_WORD)}

    def batch(self, functions: Sequence[Function]) -> Batch:
        """The functions as tensors."""
        return Batch(
            kinds=_padded([[self.kinds.get(kind, UNKNOWN) for kind in f.kinds] for f in functions], UNKNOWN),
            words=_padded([[self.words.get(word, UNKNOWN) for word in f.words] for f in functions], UNKNOWN),
            variables=_padded([f.variables for f in functions], NO_VARIABLE),
            parents=_padded([f.parents for f in functions], -1),
            lengths=torch.tensor([len(f.kinds) for f in functions]),
        )


@dataclass(frozen=True)
class Task:
    """A batch with some uses of variables hidden."""

    words: Tensor  # [batch, nodes], as the encoder sees them
    is_hidden: Tensor  # [batch, nodes]
    targets: Tensor  # [batch, nodes], the variable's name for this time
    in_scope: Tensor  # [batch, variables], names that are to be seen in the function


def hide(batch: Batch, generator: torch.Generator) -> Task:
    """Hide a share of the uses, at least one in each function, and give the variables new names.

    A use is an occurrence after the first of its variable. Names are drawn anew each time, so that only the
    places where a name is still to be seen tell what it stands for.
    """
    variables = batch.variables
    size, nodes = variables.shape
    is_same = variables[:, :, None] == variables[:, None, :]
    is_use = (is_same & torch.ones(nodes, nodes, dtype=torch.bool).tril(-1)).any(-1) & (variables >= 0)
    chance = torch.rand(size, nodes, generator=generator).masked_fill(~is_use, 2.0)
    is_hidden = is_use & (chance <= chance.amin(-1, keepdim=True).clamp(min=HIDDEN_SHARE))

    names = torch.rand(size, MOST_VARIABLES, generator=generator).argsort(-1)
    targets = names.gather(1, variables.clamp(min=0))
    words = torch.where(variables >= 0, FIRST_VARIABLE + targets, batch.words).masked_fill(is_hidden, MASK)
    # the first occurrence of a variable is never hidden
    in_scope = torch.zeros(size, MOST_VARIABLES + 1, dtype=torch.bool)
    in_scope.scatter_(1, targets.masked_fill(variables < 0, MOST_VARIABLES), True)
    return Task(words, is_hidden, targets, in_scope[:, :MOST_VARIABLES])


def hidden_logits(model: Encoder, batch: Batch, task: Task, labelling: str) -> tuple[Tensor, Tensor]:
    """Logits [hidden, variables] over the names in scope, and the right names [hidden]."""
    labels = LABELLINGS[labelling](batch).labels
    if labels.dim() == 3:
        labels = labels[:, None]  # [batch, 1, nodes, nodes], the same for each head
    logits = model(batch.kinds, task.words, labels, batch.lengths)
    logits = logits.masked_fill(~task.in_scope[:, None], float("-inf"))
    return logits[task.is_hidden], task.targets[task.is_hidden]


def train(
    model: Encoder,
    functions: Sequence[Function],
    vocabulary: Vocabulary,
    labelling: str,
    updates: int,
    seed: int,
) -> None:
    """Minimise the cross-entropy of the hidden names; the same batches and masks for each labelling."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / 50, 1.0) * (1 - update / updates)
    )
    for update, chosen in zip(range(updates), _chosen(functions, generator), strict=False):
        batch = vocabulary.batch(chosen)
        loss = F.cross_entropy(*hidden_logits(model, batch, hide(batch, generator), labelling))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (update + 1) % 100 == 0:
            print(f"{labelling}, update {update + 1}: {loss.item():.3f} nats", file=sys.stderr)


@torch.no_grad()
def score(model: Encoder, functions: Sequence[Function], vocabulary: Vocabulary, labelling: str) -> dict:
    """Share of hidden uses that are named right, beside blind choice; the same masks for each labelling."""
    generator = torch.Generator().manual_seed(0)
    right = total = 0
    blind = 0.0
    for chosen in _in_batches(sorted(functions, key=lambda function: len(function.kinds))):
        batch = vocabulary.batch(chosen)
        task = hide(batch, generator)
        logits, targets = hidden_logits(model, batch, task, labelling)
        right += int((logits.argmax(-1) == targets).sum())
        blind += float((task.is_hidden.sum(-1) / task.in_scope.sum(-1)).sum())
        total += len(targets)
    return {"accuracy": right / total, "blind_choice": blind / total, "hidden_uses": total}


def run(functions: Sequence[Function], labelling: str, updates: int, seed: int) -> dict:
    """Train and test one labelling with one seed."""
    training, held_out = split(functions)
    vocabulary = Vocabulary(training)
    num_labels = LABELLINGS[labelling](vocabulary.batch(training[:1])).num_labels
    torch.manual_seed(seed)
    model = Encoder(len(vocabulary.kinds) + 1, len(vocabulary.words) + FIRST_WORD, num_labels)
    started, started_cpu = time.perf_counter(), time.process_time()
    train(model, training, vocabulary, labelling, updates, seed)
    return {
        "labelling": labelling,
        "labels": num_labels,
        "seed": seed,
        "updates": updates,
        "functions": {"training": len(training), "held_out": len(held_out)},
        **score(model, held_out, vocabulary, labelling),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - started_cpu, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; what cannot be written or read is told in a line."""
    try:
        try:
            _run(arguments)
        finally:
            # what is held back may fail, and is better told of here than at exit
            sys.stdout.flush()
    except OSError as error:
        # Python would write what is left once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # a reader that has left is no failure
        is_left = isinstance(error, BrokenPipeError)
        sys.exit(0 if is_left else f"ast_identifiers.py: {error.strerror or error}")


def table(results: Sequence[dict]) -> str:
    """Accuracy on held-out modules by labelling: mean, and lowest to highest of several seeds."""
    blind = 100 * results[0]["blind_choice"]
    lines = [f"{'labels of pairs':<20}accuracy on held-out modules (blind choice {blind:.1f} %)"]
    for labelling in dict.fromkeys(result["labelling"] for result in results):
        scores = [100 * result["accuracy"] for result in results if result["labelling"] == labelling]
        spread = f"  ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        lines.append(f"{labelling:<20}{statistics.mean(scores):.1f} %{spread}")
    return "\n".join(lines)


def _run(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        description="Predict masked identifiers with and without tree relations.", allow_abbrev=False
    )
    parser.add_argument("--seeds", type=_positive, default=1, help="seeds for each labelling (default 1)")
    parser.add_argument(
        "--updates", type=_positive, default=1600, help="updates of each training (default 1600)"
    )
    parser.add_argument(
        "--functions", type=_positive, metavar="N", help="read about N functions only, to try it out"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON line for each training, not a table"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are small

    functions = read_functions()
    functions = functions[:: max(1, len(functions) // (options.functions or len(functions)))]
    if not all(split(functions)):
        parser.error(f"functions must be enough for training and test; got {len(functions)}. Take more.")
    results = []
    for seed in range(options.seeds):
        for labelling in LABELLINGS:
            result = run(functions, labelling, options.updates, seed)
            results.append(result)
            if options.json:
                print(json.dumps(result), flush=True)
    if not options.json:
        print(table(results))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1; got {text}")
    return int(text)


def _padded(rows: Iterable[Sequence[int]], filler: int) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, filler)


def _chosen(functions: Sequence[Function], generator: torch.Generator) -> Iterator[list[Function]]:
    """Batches of functions of like length, in random order, without end."""
    while True:
        order = torch.randperm(len(functions), generator=generator).tolist()
        # shuffled first, so that functions of one length meet others each time
        ordered = sorted((functions[i] for i in order), key=lambda function: len(function.kinds))
        batches = list(_in_batches(ordered))
        yield from (batches[i] for i in torch.randperm(len(batches), generator=generator).tolist())


def _in_batches(functions: Sequence[Function]) -> Iterator[list[Function]]:
    for first in range(0, len(functions), FUNCTIONS_PER_BATCH):
        yield list(functions[first : first + FUNCTIONS_PER_BATCH])


if __name__ == "__main__":
    main()
