"""Decoding with modules: prefixes, beams, streams, and how many tokens a step really projects."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.nn import RelativeTransformer

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, INNER, BATCH, LENGTH, LAYERS, WORDS = 16, 2, 24, 2, 8, 2, 11
BEGIN = 0


class Translator(nn.Module):
    """Embeddings, a transformer and a layer of scores, without absolute positions."""

    def __init__(self, **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.core = RelativeTransformer(
            WIDTH,
            HEADS,
            LAYERS,
            LAYERS,
            INNER,
            dropout=0.1,
            batch_first=True,
            **{"max_distance": None} | settings,
        )
        self.scores = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.core(self.tokens(source), self.tokens(target), tgt_is_causal=True)
        return self.scores(states)

    def encode(self, source: Tensor) -> Tensor:
        return self.core.encoder(self.tokens(source))

    def decode(self, target: Tensor, memory: Tensor, caches=None, memory_caches=None) -> Tensor:
        """Scores of what follows each token, [batch, chunk, words]."""
        states = self.core.decoder(
            self.tokens(target), memory, tgt_is_causal=True, caches=caches, memory_caches=memory_caches
        )
        return self.scores(states)


def counting(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Sources that say a number again and again, and targets that count on from it."""
    source = starts[:, None].expand(-1, 4)
    return source, (starts[:, None] - 1 + torch.arange(LENGTH)) % (WORDS - 1) + 1


def shifted(target: Tensor) -> Tensor:
    return torch.cat((torch.full((len(target), 1), BEGIN), target[:, :-1]), 1)


def train_to_count(model: Translator, updates: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    source, target = counting(torch.arange(1, WORDS))
    for _ in range(updates):
        loss = F.cross_entropy(model(source, shifted(target)).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def beam_search(model: Translator, source: Tensor, beams: int, kind: str) -> Tensor:
    """The best of `beams` hypotheses of LENGTH tokens, with no cache, a growing or a static one."""
    memory = model.encode(source).repeat_interleave(beams, 0)
    rows = len(source) * beams
    caches, memory_caches = None, None
    if kind != "none":
        sizes = {"batch": rows, "capacity": LENGTH} if kind == "static" else {}
        caches, memory_caches = model.core.decoder.make_caches(**sizes)
    tokens = torch.full((rows, 1), BEGIN)
    scores = torch.tensor([0.0] + [float("-inf")] * (beams - 1)).double().repeat(len(source))
    for _ in range(LENGTH):
        given = tokens if caches is None else tokens[:, -1:]
        step = model.decode(given, memory, caches, memory_caches)[:, -1].log_softmax(-1)
        scores, best = (scores[:, None] + step).view(len(source), -1).topk(beams)
        scores = scores.flatten()
        parents = (torch.arange(len(source))[:, None] * beams + best // WORDS).flatten()
        tokens = torch.cat((tokens[parents], (best % WORDS).view(-1, 1)), 1)
        for cache in [] if caches is None else caches + memory_caches:
            cache.reorder(parents)
    return tokens.view(len(source), beams, -1)[:, 0, 1:]


@pytest.mark.parametrize(
    "settings", [{"max_distance": 3}, {"max_distance": (4, 0), "relative_per_head": True}]
)
def test_trained_then_beam_searched_with_any_cache_the_tokens_are_the_same(settings) -> None:
    model = Translator(**settings)
    train_to_count(model, 60)
    model.eval()
    source, target = counting(torch.tensor([3, 9, 5]))
    with torch.no_grad():
        found = {kind: beam_search(model, source, 3, kind) for kind in ("none", "growing", "static")}
    assert torch.equal(found["growing"], found["none"])
    assert torch.equal(found["static"], found["none"])
    assert torch.equal(found["none"], target)
