"""Caches, and masks and memories beside them, that do not fit are refused before a cache is filled."""

import pytest
import torch
from small_modules import BATCH, KEY, QUERIES, QUERY, attention, layer, refuses

from relpos.nn import (
    KeyValueCache,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)


def test_masks_beside_a_cache_count_what_is_held_and_a_refusal_leaves_it_as_it_was() -> None:
    for capacity, allowed in ((None, "[2, 10]"), (12, "[2, 10] or [2, 12]")):
        ours = attention(max_distance=2).requires_grad_(False)
        cache = ours.make_cache(batch=None if capacity is None else BATCH, capacity=capacity)
        ours(QUERY, QUERY, QUERY, cache=cache)
        with refuses(ValueError, f"key_padding_mask must be [batch, key] = {allowed}; got [2, 5].", "With a"):
            ours(QUERY, QUERY, QUERY, torch.zeros(BATCH, QUERIES).bool(), cache=cache)
        assert cache.length == QUERIES


def test_a_decoder_layer_refuses_what_is_no_cache_of_its_own_before_it_fills_one() -> None:
    ours, cache = layer(RelativeTransformerDecoderLayer), KeyValueCache()
    for given, error, *parts in (
        ({"cache": [cache]}, TypeError, "cache must be a cache of one attention module; got list."),
        ({"cache": cache, "memory_cache": [cache]}, TypeError, "memory_cache must be a cache", "got list."),
        ({"cache": cache, "memory_cache": cache}, ValueError, "memory_cache must be a cache of its own"),
    ):
        with refuses(error, *parts):
            ours(QUERY, KEY, **given)
    assert cache.length == 0


@pytest.mark.parametrize("name", ["caches", "memory_caches"])
def test_a_stack_refuses_caches_that_are_not_one_for_each_layer(name) -> None:
    encoder = RelativeTransformerEncoder(layer(RelativeTransformerEncoderLayer), 3)
    decoder = RelativeTransformerDecoder(layer(RelativeTransformerDecoderLayer), 3).eval()
    one, other = (KeyValueCache(is_memory=name == "memory_caches") for _ in range(2))
    for given, error, *parts in (
        ([one], ValueError, f"{name} must have one cache for each layer = 3; got 1."),
        (one, TypeError, f"{name} must be a list of caches; got KeyValueCache."),
        ([None, 3, None], TypeError, f"{name}[1] must be a cache of one attention module; got int."),
        ([one, other, one], ValueError, f"{name}[2] must be a cache of its own", f"{name}[0]."),
    ):
        with refuses(error, *parts):
            decoder(QUERY, KEY, **{name: given})
        if name == "caches":
            with refuses(error, *parts):
                encoder(QUERY, caches=given)
    assert one.length == other.length == 0
    # None is no cache that layers share
    torch.testing.assert_close(decoder(QUERY, KEY, memory_caches=[None] * 3), decoder(QUERY, KEY))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_memory_of_another_length_than_its_cache_holds_is_refused(batch_first) -> None:
    query, key, shorter = (x if batch_first else x.transpose(0, 1) for x in (QUERY, KEY, KEY[:, 1:]))
    ours, cache = attention(batch_first=batch_first), KeyValueCache(is_memory=True)
    ours(query, key, key, cache=cache)
    with refuses(ValueError, "key must have the length held in cache = 7; got 6."):
        ours(query, shorter, shorter, cache=cache)
    ours = layer(RelativeTransformerDecoderLayer, batch_first=batch_first)
    cache, memory_cache = KeyValueCache(), KeyValueCache(is_memory=True)
    ours(query, key, memory_cache=memory_cache)
    with refuses(ValueError, "memory must have the length held in memory_cache = 7; got 6."):
        ours(query, shorter, cache=cache, memory_cache=memory_cache)
    assert cache.length == 0


def test_the_cache_of_another_batch_s_memory_is_refused() -> None:
    ours, cache = attention(), KeyValueCache(is_memory=True)
    ours(QUERY, KEY, KEY, cache=cache)
    with refuses(ValueError, "cache must have the batch size of query = 1; got 2."):
        ours(QUERY[:1], KEY[:1], KEY[:1], cache=cache)
