"""The cache of static capacity: what was never filled counts for nothing, and a step compiles once."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from relpos.nn import KeyValueCache, RelativeMultiheadAttention, StaticKeyValueCache

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, BATCH, LENGTH, CAPACITY = 16, 2, 3, 10, 14
MODES = {
    "none": {},
    "both": {"max_distance": 2},
    "keys": {"max_distance": 2, "relative_values": False},
    "values": {"max_distance": 2, "relative_keys": False},
    "left over right": {"max_distance": (3, 1)},
    "per head": {"max_distance": 2, "relative_per_head": True},
    "k = 0": {"max_distance": 0},
    "beyond the length": {"max_distance": 30},
}
modes = pytest.mark.parametrize("mode", MODES)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(**settings) -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    options = {"batch_first": True, "dtype": torch.float64, "max_distance": None} | settings
    return RelativeMultiheadAttention(WIDTH, HEADS, **options).eval().requires_grad_(False)


def static(ours: RelativeMultiheadAttention, capacity: int = CAPACITY) -> StaticKeyValueCache:
    """An empty cache whose memory holds NaN."""
    cache = ours.make_cache(batch=BATCH, capacity=capacity)
    assert isinstance(cache, StaticKeyValueCache)
    cache.key.fill_(float("nan"))
    cache.value.fill_(float("nan"))
    return cache


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@modes
@pytest.mark.parametrize(
    "chunks", [[1] * LENGTH, [3, 3, 3, 1], [LENGTH], [4, 1, 1, 1, 1, 1, 1], [0, 6, 0, 4]]
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_chunks_with_a_static_cache_equal_one_pass(mode, chunks, batch_first) -> None:
    ours, x = attention(batch_first=batch_first, **MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    if not batch_first:
        x = x.transpose(0, 1)
    true, _ = ours(x, x, x, is_causal=True)
    cache, time, parts = static(ours), 1 if batch_first else 0, []
    for part in x.split(chunks, dim=time):
        assert cache.length == sum(y.shape[time] for y in parts)
        parts.append(ours(part, part, part, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, time), true, atol=1e-10, rtol=1e-10)
    assert cache.length == LENGTH


@modes
@pytest.mark.parametrize("counted", ["held", "capacity"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_may_count_what_is_held_or_the_capacity(mode, counted, kind) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, CAPACITY, dtype=torch.bool)
    padding[1, :2], padding[2, 4] = True, True
    banded = torch.ones(CAPACITY, CAPACITY, dtype=torch.bool).tril(-4)
    if kind == "float":
        padding, banded = (
            torch.zeros(x.shape).double().masked_fill(x, float("-inf")) for x in (padding, banded)
        )
    true, true_weights = ours(
        x, x, x, padding[:, :LENGTH], attn_mask=banded[:LENGTH, :LENGTH], is_causal=True
    )
    cache, stop = static(ours), 0
    for chunk in (4, 1, 5):
        start, stop = stop, stop + chunk
        keys = stop if counted == "held" else CAPACITY
        part, rows = x[:, start:stop], banded[start:stop, :keys]
        out, weights = ours(part, part, part, padding[:, :keys], attn_mask=rows, is_causal=True, cache=cache)
        torch.testing.assert_close(out, true[:, start:stop], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(weights, true_weights[:, start:stop, :stop], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mode", ["none", "left over right", "per head"])
def test_ten_compiled_steps_compile_once_and_equal_one_pass(mode, counter) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, CAPACITY, dtype=torch.bool)
    padding[1, :2] = True
    true, true_weights = ours(x, x, x, padding[:, :LENGTH], is_causal=True)
    step = torch.compile(ours, backend=counter, fullgraph=True)
    cache = static(ours)
    for i, part in enumerate(x.split(1, 1)):
        out, weights = step(part, part, part, padding, is_causal=True, cache=cache)
        torch.testing.assert_close(out, true[:, i : i + 1], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(weights[..., :LENGTH], true_weights[:, i : i + 1], atol=1e-10, rtol=1e-10)
        assert not weights[..., i + 1 :].any()
    assert counter.frame_count == 1
    assert cache.length == LENGTH


def test_a_prefix_and_compiled_steps_go_on_with_one_cache(counter) -> None:
    ours, x = attention(max_distance=2), draw(BATCH, LENGTH, WIDTH)
    true, _ = ours(x, x, x, is_causal=True)
    step, cache, first = torch.compile(ours, backend=counter, fullgraph=True), static(ours), x[:, :4]
    found = [ours(first, first, first, is_causal=True, cache=cache)[0]]
    found += [step(part, part, part, is_causal=True, cache=cache)[0] for part in x[:, 4:8].split(1, 1)]
    last = x[:, 8:]
    found.append(ours(last, last, last, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)
    assert counter.frame_count == 1


def test_a_compiled_step_needs_masks_of_the_capacity(counter) -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 1, WIDTH)
    step, padding = torch.compile(ours, backend=counter), torch.zeros(BATCH, 1, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"key_padding_mask must be \[batch, key\] = \[3, 14\]; got \[3, 1\]\."
    ):
        step(x, x, x, padding, is_causal=True, cache=static(ours))


@modes
def test_a_foreign_cache_may_return_more_than_it_holds(mode) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)

    class Roomy:
        is_memory = False

        def __init__(self) -> None:
            self.held = static(ours)

        @property
        def length(self) -> int:
            return self.held.length

        def filled_memory(self) -> None:
            return None

        def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            self.held.append(key, value)
            return self.held.key, self.held.value

    true, _ = ours(x, x, x)
    cache, first = Roomy(), x[:, :7]
    ours(first, first, first, cache=cache)
    last = x[:, 7:]
    found, weights = ours(last, last, last, cache=cache)
    torch.testing.assert_close(found, true[:, 7:], atol=1e-10, rtol=1e-10)
    assert weights.shape == (BATCH, 3, LENGTH)


@modes
def test_reordered_rows_go_on_as_if_they_had_always_been_so(mode) -> None:
    ours, x = attention(**MODES[mode]), draw(BATCH, LENGTH, WIDTH)
    rows, first, rest, cache = torch.tensor([2, 0, 0]), x[:, :4], x[:, 4:], static(ours)
    ours(first, first, first, is_causal=True, cache=cache)
    cache.reorder(rows)
    found, _ = ours(rest, rest, rest, is_causal=True, cache=cache)
    whole = torch.cat((first[rows], rest), 1)
    true, _ = ours(whole, whole, whole, is_causal=True)
    torch.testing.assert_close(found, true[:, 4:], atol=1e-10, rtol=1e-10)


def test_its_tensors_stay_where_they_are() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 2, WIDTH)
    cache = static(ours)
    places = cache.key.data_ptr(), cache.value.data_ptr()
    ours(x, x, x, cache=cache)
    cache.reorder(torch.tensor([1, 0, 2]))
    cache.reset()
    ours(x, x, x, cache=cache)
    assert (cache.key.data_ptr(), cache.value.data_ptr()) == places
    assert cache.capacity == CAPACITY


def test_after_a_reset_what_was_held_counts_for_nothing() -> None:
    ours, x, y = attention(max_distance=2), draw(BATCH, LENGTH, WIDTH), draw(BATCH, 4, WIDTH, seed=2)
    cache = static(ours)
    ours(x, x, x, cache=cache)
    cache.reset()
    assert cache.length == 0
    found, _ = ours(y, y, y, cache=cache)
    torch.testing.assert_close(found, ours(y, y, y)[0], atol=1e-12, rtol=1e-12)


def test_it_is_filled_in_inference_mode_and_out_of_it() -> None:
    ours, x = attention(max_distance=2).requires_grad_(), draw(BATCH, LENGTH, WIDTH)
    true, _ = ours(x, x, x, is_causal=True)
    cache, found = static(ours), []
    for part, mode in zip(x.split(5, 1), (torch.inference_mode, torch.no_grad), strict=True):
        with mode():
            found.append(ours(part, part, part, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(found, 1), true, atol=1e-10, rtol=1e-10)


def test_a_copy_of_it_goes_its_own_way() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 2, WIDTH)
    cache = static(ours)
    ours(x, x, x, cache=cache)
    twin, position = copy.deepcopy(cache), cache.position
    ours(x, x, x, cache=twin)
    assert (cache.length, twin.length, int(position)) == (2, 4, 2)


def test_a_position_once_asked_for_stays_what_it_is() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 2, WIDTH)
    cache = static(ours)
    position = cache.position
    ours(x, x, x, cache=cache)
    assert int(position) == 0
    assert int(cache.position) == 2


def test_a_full_cache_is_an_error_that_leaves_it_as_it_was() -> None:
    ours, x = attention(max_distance=2), draw(BATCH, LENGTH, WIDTH)
    cache = static(ours, capacity=LENGTH)
    first, last, more = x[:, :8], x[:, 8:], x[:, :3]
    ours(first, first, first, is_causal=True, cache=cache)
    with pytest.raises(ValueError, match=r"^capacity of the cache must be at least .* = 11; got 10\. "):
        ours(more, more, more, cache=cache)
    found, _ = ours(last, last, last, is_causal=True, cache=cache)
    torch.testing.assert_close(found, ours(x, x, x, is_causal=True)[0][:, 8:], atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_full_cache_is_an_error_in_compiled_code_too(backend) -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 1, WIDTH)
    step, cache = torch.compile(ours, fullgraph=True, backend=backend), static(ours, capacity=2)
    for _ in range(2):
        step(x, x, x, need_weights=False, cache=cache)
    with pytest.raises(RuntimeError, match=r"the cache is full: its capacity is 2 tokens"):
        step(x, x, x, need_weights=False, cache=cache)


def test_what_needs_a_gradient_is_refused() -> None:
    ours, x = attention(max_distance=2).requires_grad_(), draw(BATCH, 2, WIDTH)
    with pytest.raises(ValueError, match=r"^key and value must not require a gradient.* torch\.no_grad\(\)"):
        ours(x, x, x, cache=static(ours))
    with torch.no_grad():
        assert ours(x, x, x, cache=static(ours))[0].isfinite().all()


def test_a_dtype_that_would_lose_something_is_refused_and_a_wider_one_is_not() -> None:
    ours, x = attention(max_distance=2, dtype=torch.float32), draw(BATCH, 2, WIDTH).float()
    narrow = StaticKeyValueCache(BATCH, HEADS, 4, WIDTH // HEADS, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"^dtype of the cache .* = torch\.float32; got torch\.bfloat16\. "):
        ours(x, x, x, cache=narrow)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ours(x, x, x, need_weights=False, cache=static(ours))
        true, _ = ours(x, x, x, need_weights=False)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, true)


@pytest.mark.parametrize("kind", [KeyValueCache, StaticKeyValueCache])
def test_a_chunk_of_another_batch_is_refused(kind) -> None:
    ours, x = attention(max_distance=2), draw(BATCH, 2, WIDTH)
    cache = KeyValueCache() if kind is KeyValueCache else static(ours)
    ours(x, x, x, cache=cache)
    other = x[:2]
    with pytest.raises(ValueError, match=r"^key and value .* = \[3, 2, 8\]; got \[2, 2, 8\]\. "):
        ours(other, other, other, cache=cache)
    assert cache.length == 2


ROWS = {
    "list": ([0, 1, 2], TypeError, r"^rows must be a tensor of int64 or int32; got list\."),
    "float": (torch.zeros(3), TypeError, r"^rows must be a tensor of int64 or int32; got torch\.float32\."),
    "rank": (torch.zeros(3, 1).long(), ValueError, r"^rows must be \[batch\]; got \[3, 1\]\."),
    "range": (torch.tensor([0, 3, 1]), ValueError, r"^rows must be between 0 and .* = 2; got 0 to 3\."),
    "negative": (torch.tensor([0, -1, 1]), ValueError, r"^rows must be between .* got -1 to 1\."),
    "device": (torch.zeros(3, device="meta").long(), ValueError, r"^rows must be .* = cpu; got meta\."),
}


@pytest.mark.parametrize("fault", ROWS)
@pytest.mark.parametrize("kind", [KeyValueCache, StaticKeyValueCache])
def test_rows_that_number_nothing_are_refused(kind, fault) -> None:
    ours, x = attention(), draw(BATCH, 2, WIDTH)
    cache = KeyValueCache() if kind is KeyValueCache else static(ours)
    ours(x, x, x, cache=cache)
    rows, error, message = ROWS[fault]
    with pytest.raises(error, match=message):
        cache.reorder(rows)


def test_a_growing_cache_takes_any_number_of_rows_and_a_static_one_its_own() -> None:
    ours, x, rows = attention(), draw(BATCH, 2, WIDTH), torch.tensor([0, 0, 1, 1])
    growing, fixed = KeyValueCache(), static(ours)
    for cache in (growing, fixed):
        ours(x, x, x, cache=cache)
    growing.reorder(rows)
    assert growing.key.shape[0] == 4
    with pytest.raises(ValueError, match=r"^rows must be as many as the batch .* = 3; got 4\. "):
        fixed.reorder(rows)


def test_sizes_that_are_no_sizes_are_refused_by_name() -> None:
    ours = attention()
    for arguments, error, message in (
        ({"batch": 2}, ValueError, r"^batch and capacity must be .*; got batch=2, capacity=None\."),
        ({"batch": 2, "capacity": 0}, ValueError, r"^capacity must be at least 1; got 0\."),
        ({"batch": 2, "capacity": 1.5}, TypeError, r"^capacity must be an integer; got float\."),
        ({"batch": True, "capacity": 4}, TypeError, r"^batch must be an integer; got bool\."),
    ):
        with pytest.raises(error, match=message):
            ours.make_cache(**arguments)
    with pytest.raises(TypeError, match=r"^dtype must be a float dtype; got torch\.int64\."):
        StaticKeyValueCache(1, 2, 3, 4, dtype=torch.int64)
    assert isinstance(ours.make_cache(), KeyValueCache)
