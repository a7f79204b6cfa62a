"""The cache: tokens in chunks of any length give what one pass gives, and are projected once."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.nn import (
    AttentionCache,
    KeyValueCache,
    RelativeMultiheadAttention,
    RelativeTransformerDecoderLayer,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, BATCH, LENGTH = 16, 2, 3, 10
MODES = {
    "none": {},
    "both": {"max_distance": 2},
    "keys": {"max_distance": 2, "relative_values": False},
    "values": {"max_distance": 2, "relative_keys": False},
    "left over right": {"max_distance": (3, 1)},
    "left only, per head": {"max_distance": (4, 0), "relative_per_head": True},
    "k = 0": {"max_distance": 0},
    "beyond the length": {"max_distance": 30},
}
modes = pytest.mark.parametrize("mode", MODES)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(batch_first: bool = True, **settings) -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "dtype": torch.float64, "max_distance": None} | settings
    return RelativeMultiheadAttention(WIDTH, HEADS, **options).eval()


class ProjectedTokens:
    """Counts calls of F.linear, and the tokens that they project."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        linear = F.linear

        def counted(x: Tensor, *arguments) -> Tensor:
            self.tokens.append(x.shape[:-1].numel())
            return linear(x, *arguments)

        monkeypatch.setattr(F, "linear", counted)


@modes
@pytest.mark.parametrize("chunk", [1, 3, LENGTH])
@pytest.mark.parametrize("batch_first", [True, False])
def test_chunks_with_a_cache_equal_one_pass(mode, chunk, batch_first) -> None:
    ours, x = attention(batch_first, **MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    if not batch_first:
        x = x.transpose(0, 1)
    true, _ = ours(x, x, x, need_weights=False, is_causal=True)
    cache, time = KeyValueCache(), 1 if batch_first else 0
    parts = []
    for part in x.split(chunk, dim=time):
        assert cache.length == chunk * len(parts)
        parts.append(ours(part, part, part, need_weights=False, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, time), true, atol=1e-10, rtol=1e-10)
    assert cache.length == LENGTH


@modes
def test_chunks_of_unequal_length_with_padding_equal_one_pass(mode) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, :2], padding[2, 4] = True, True
    true, true_weights = ours(x, x, x, padding, is_causal=True)
    cache, stop = KeyValueCache(), 0
    for chunk in (4, 1, 5):
        start, stop = stop, stop + chunk
        part = x[:, start:stop]
        out, weights = ours(part, part, part, padding[:, :stop], is_causal=True, cache=cache)
        torch.testing.assert_close(out, true[:, start:stop], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(weights, true_weights[:, start:stop, :stop], atol=1e-10, rtol=1e-10)


def test_zeroing_a_table_changes_cached_output_as_it_changes_one_pass() -> None:
    x = draw(BATCH, LENGTH, WIDTH)
    for name in ("relative_position_keys", "relative_position_values"):
        ours = attention(max_distance=2)
        before = in_steps(ours, x)
        with torch.no_grad():
            getattr(ours, name).zero_()
        after = in_steps(ours, x)
        assert not torch.allclose(before[:, -1], after[:, -1])
        true, _ = ours(x, x, x, need_weights=False, is_causal=True)
        torch.testing.assert_close(after, true, atol=1e-10, rtol=1e-10)


def in_steps(ours: RelativeMultiheadAttention, x: Tensor) -> Tensor:
    cache = KeyValueCache()
    steps = [
        ours(part, part, part, need_weights=False, is_causal=True, cache=cache)[0] for part in x.split(1, 1)
    ]
    return torch.cat(steps, 1)


@modes
def test_reordered_rows_go_on_as_if_they_had_always_been_so(mode) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    rows, first = torch.tensor([2, 0, 0]), x[:, :4]
    cache = KeyValueCache()
    ours(first, first, first, is_causal=True, cache=cache)
    cache.reorder(rows)
    rest = x[:, 4:]
    found, _ = ours(rest, rest, rest, is_causal=True, cache=cache)
    whole = torch.cat((first[rows], rest), 1)
    true, _ = ours(whole, whole, whole, is_causal=True)
    torch.testing.assert_close(found, true[:, 4:], atol=1e-10, rtol=1e-10)


def test_an_empty_cache_can_be_reordered_and_holds_nothing() -> None:
    for is_memory in (True, False):
        cache = KeyValueCache(is_memory=is_memory)
        cache.reorder(torch.tensor([0]))
        assert cache.length == 0
        assert cache.filled_memory() is None


def test_a_step_projects_its_own_tokens_alone(monkeypatch) -> None:
    ours, x, cache = attention(max_distance=2), draw(BATCH, LENGTH, WIDTH), KeyValueCache()
    first = x[:, :6]
    ours(first, first, first, is_causal=True, cache=cache)
    counted = ProjectedTokens(monkeypatch)
    step = x[:, 6:7]
    ours(step, step, step, is_causal=True, cache=cache)
    assert counted.tokens == [BATCH, BATCH]  # queries, keys and values at once; then the output


def test_memory_is_projected_once(monkeypatch) -> None:
    ours, memory, cache = attention(), draw(BATCH, 7, WIDTH, seed=2), KeyValueCache(is_memory=True)
    counted = ProjectedTokens(monkeypatch)
    for step in draw(BATCH, 4, WIDTH).split(1, 1):
        found, _ = ours(step, memory, memory, cache=cache)
        seen = list(counted.tokens)
        torch.testing.assert_close(found, ours(step, memory, memory)[0], atol=1e-12, rtol=1e-12)
        counted.tokens[:] = seen
    assert counted.tokens.count(BATCH * 7) == 1
    assert len(counted.tokens) == 1 + 2 * 4  # the memory, and each step's query and output


def test_a_memory_that_was_projected_is_not_read_again_whatever_its_batch() -> None:
    ours, memory, cache = attention(), draw(BATCH, 7, WIDTH, seed=2), KeyValueCache(is_memory=True)
    step, rows = draw(BATCH, 1, WIDTH), torch.arange(BATCH).repeat_interleave(2)
    ours(step, memory, memory, cache=cache)
    cache.reorder(rows)
    beams = step[rows]
    true, _ = ours(beams, memory[rows], memory[rows])
    torch.testing.assert_close(ours(beams, memory, memory, cache=cache)[0], true, atol=1e-12, rtol=1e-12)
    layer = RelativeTransformerDecoderLayer(
        WIDTH, HEADS, 24, batch_first=True, max_distance=2, dtype=torch.float64
    ).eval()
    memory_cache = KeyValueCache(is_memory=True)
    layer(step, memory, memory_cache=memory_cache)
    memory_cache.reorder(rows)
    found = layer(beams, memory, memory_cache=memory_cache)
    torch.testing.assert_close(found, layer(beams, memory[rows]), atol=1e-12, rtol=1e-12)


def test_a_memory_cache_with_tables_is_refused() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 4, WIDTH)
    with pytest.raises(ValueError, match=r"^a cache with is_memory=True .* max_distance=None\.$"):
        ours(x, x, x, cache=KeyValueCache(is_memory=True))


def test_causal_attention_to_a_cached_memory_is_refused() -> None:
    ours, step, memory = attention(), draw(BATCH, 2, WIDTH), draw(BATCH, 7, WIDTH, seed=2)
    cache = KeyValueCache(is_memory=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^is_causal .* memory cache.* Give query_start"):
            ours(step, memory, memory, is_causal=True, cache=cache)
        ours(step, memory, memory, cache=cache)


@pytest.mark.parametrize("given", [("cache",), ("memory_cache",), ("cache", "memory_cache")])
def test_decoder_layer_refuses_a_causal_memory_in_chunks_before_it_fills_a_cache(given) -> None:
    layer = RelativeTransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True, max_distance=2).double()
    caches = {"cache": KeyValueCache(), "memory_cache": KeyValueCache(is_memory=True)}
    caches = {name: cache for name, cache in caches.items() if name in given}
    with pytest.raises(ValueError, match=r"^memory_is_causal cannot .* Give memory_mask\.$"):
        layer(draw(BATCH, 2, WIDTH), draw(BATCH, 7, WIDTH), memory_is_causal=True, **caches)
    assert all(cache.length == 0 for cache in caches.values())


def test_decoder_layer_in_chunks_with_a_causal_memory_mask_equals_one_pass() -> None:
    torch.manual_seed(0)
    layer = RelativeTransformerDecoderLayer(
        WIDTH, HEADS, 24, batch_first=True, max_distance=2, dtype=torch.float64
    ).eval()
    tgt, memory = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=2)
    true = layer(tgt, memory, tgt_is_causal=True, memory_is_causal=True)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    caches = {"cache": KeyValueCache(), "memory_cache": KeyValueCache(is_memory=True)}
    found = [
        layer(part, memory, memory_mask=rows, tgt_is_causal=True, **caches)
        for part, rows in zip(tgt.split(3, 1), hidden.split(3), strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)


class Lent:
    """A cache of another kind, that holds no tensors of its own."""

    is_memory = False

    def __init__(self) -> None:
        self.held = KeyValueCache()

    @property
    def length(self) -> int:
        return self.held.length

    def filled_memory(self) -> None:
        return None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.held.append(key, value)


def test_any_object_with_the_four_members_of_a_cache_serves_as_one() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, LENGTH, WIDTH)
    true, _ = ours(x, x, x, need_weights=False, is_causal=True)
    cache: AttentionCache = Lent()
    steps = [ours(part, part, part, is_causal=True, cache=cache)[0] for part in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), true, atol=1e-10, rtol=1e-10)
    assert cache.length == LENGTH
