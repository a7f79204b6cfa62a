"""Observe each relative attention layer of a model while it runs.

Hooks read the inputs and compute the parts a second time (`relpos.decompose`); they change nothing.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.decompose import Parts, by_distance, decompose
from relpos.nn import AttentionCache, AttentionCore, RelativeMultiheadAttention
from relpos.nn._masks import merge_masks
from relpos.nn._nested_tensors import padded

# keeps 0 / 0 at 0 in a layer where no query has a key
_TINY = 1e-30


@dataclass(frozen=True)
class Observation:
    """One call of one layer, on the CPU. Numbers by distance exclude padding.

    Attributes:
        layer: name of the attention module in the model.
        left, right: clipping distances, in tokens; labels = left + right + 1, row `left` is distance 0.
        query_start: position of the first query among the keys, in tokens.
        content_logits, position_logits, weights: [batch, heads, query, key], see `relpos.decompose.Parts`.
        allowed: bool [batch, heads, query, key], False where a mask hides the key.
        pairs: [heads, labels], number of token pairs at each distance.
        content_by_distance, position_by_distance: [heads, labels], mean logit in nats; NaN without a pair.
        weight_by_distance: [heads, labels], share of the attention at each distance; sums to 1.
        position_share: [heads, labels], share of the output that comes from rel_v, 0 to 1, by norms:
            w |rel_v| / (w |value| + w |rel_v|), each summed over the pairs. NaN where there is no pair.
        rel_v_norms: [1 or heads, labels], norm of each row of rel_v; None without rel_v.
        has_rel_k: whether the layer has a table for the keys.
    """

    layer: str
    left: int
    right: int
    query_start: int
    content_logits: Tensor
    position_logits: Tensor
    weights: Tensor
    allowed: Tensor
    pairs: Tensor
    content_by_distance: Tensor
    position_by_distance: Tensor
    weight_by_distance: Tensor
    position_share: Tensor
    rel_v_norms: Tensor | None
    has_rel_k: bool


def observe(model: nn.Module, run: Callable[[], object]) -> list[Observation]:
    """Observe every layer with relative positions while `run()` calls the model.

    Args:
        model: a module with `relpos.nn.RelativeMultiheadAttention` or `AttentionCore` inside, as the
            translator's model has; layers without tables are skipped.
        run: calls the model once or more; its result is ignored. Observations exclude dropout, so put the
            model in eval mode to observe the weights that it uses.
    Returns:
        One observation for each call of each layer, in order; empty if the model has no relative positions.
        Each needs memory [batch, heads, query, key], so run short sentences.
    Raises:
        Any exception of `run`. The hooks are always removed.
    """
    seen: list[Observation] = []
    handles = []
    try:
        for name, module in model.named_modules():
            if isinstance(module, RelativeMultiheadAttention) and module.is_relative:
                handles.append(module.register_forward_pre_hook(_lend_cache, with_kwargs=True))
                handles.append(module.register_forward_hook(_recorder(name, seen), with_kwargs=True))
            elif isinstance(module, AttentionCore):
                name = name.rpartition(".")[0]
                handles.append(module.register_forward_hook(_recorder(name, seen), with_kwargs=True))
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


class _LentCache:
    """Wraps the caller's cache, and remembers the keys and values that it last returned."""

    def __init__(self, cache: AttentionCache) -> None:
        self._cache = cache
        self.is_memory = cache.is_memory
        self.start = cache.length
        self.given: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self._cache.length

    def filled_memory(self) -> tuple[Tensor, Tensor] | None:
        return self._cache.filled_memory()

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.given = self._cache.append(key, value)
        return self.given


def _lend_cache(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    cache = kwargs.get("cache")
    if cache is None:
        return None
    lent: AttentionCache = _LentCache(cache)
    return args, {**kwargs, "cache": lent}


def _recorder(name: str, seen: list[Observation]) -> Callable[[nn.Module, tuple, dict, object], None]:
    @torch.no_grad()
    def record(module: nn.Module, args: tuple, kwargs: dict, _output: object) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if isinstance(module, RelativeMultiheadAttention):
            seen.append(_look(name, _call_of_module(module, given)))
        elif given["rel_k"] is not None or given["rel_v"] is not None:
            seen.append(_look(name, _call_of_core(given)))

    return record


@dataclass(frozen=True)
class _Call:
    """One call, as `relative_attention` takes it; and padding, bool [batch, key], True = padding."""

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None
    max_distance: tuple[int, int]
    start: int
    attn_mask: Tensor | None
    is_causal: bool
    padding: Tensor | None


def _call_of_module(module: RelativeMultiheadAttention, given: dict[str, Any]) -> _Call:
    query, key, value, padding = (given[name] for name in ("query", "key", "value", "key_padding_mask"))
    if query.is_nested:
        query, key, value, padding = padded(query, key, value)
    if padding is not None and padding.dim() == 1:
        # one sequence without a batch
        padding = padding[None]
    query, key, value = module.project(*module.batches(query, key, value))
    start = 0
    if given["cache"] is not None:
        start, (key, value) = given["cache"].start, given["cache"].given
    if given["query_start"] is not None:
        start = _one_start(given["query_start"])
    assert module.max_distance is not None
    sizes = {"batch": query.shape[0], "num_heads": module.num_heads}
    return _Call(
        query,
        key,
        value,
        module.relative_position_keys,
        module.relative_position_values,
        module.max_distance,
        start,
        # merged as the module does, so that the observation uses the same mask
        attn_mask=merge_masks(given["attn_mask"], padding, **sizes),
        is_causal=given["is_causal"],
        padding=padding if padding is not None and padding.dtype == torch.bool else None,
    )


def _call_of_core(given: dict[str, Any]) -> _Call:
    mask = given["attn_mask"]
    # a mask that is the same for every query hides padding
    is_padding = mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)
    start = given["query_start"]
    return _Call(
        given["query"],
        given["key"],
        given["value"],
        given["rel_k"],
        given["rel_v"],
        given["max_distance"],
        0 if start is None else _one_start(start),
        attn_mask=mask,
        is_causal=given["is_causal"],
        padding=~mask[:, 0, 0] if is_padding else None,
    )


def _look(name: str, call: _Call) -> Observation:
    with torch.autocast(call.query.device.type, enabled=False):
        parts = decompose(
            call.query,
            call.key,
            call.value,
            call.rel_k,
            call.rel_v,
            max_distance=call.max_distance,
            query_start=call.start,
            attn_mask=call.attn_mask,
            is_causal=call.is_causal,
        )
        return _summary(name, call, parts)


def _one_start(query_start: int | Tensor) -> int:
    starts = torch.as_tensor(query_start).unique().tolist()
    if len(starts) != 1:
        raise ValueError(
            f"query_start must be the same for all sequences of an observed call; got {starts}. "
            "Observe them one by one."
        )
    return int(starts[0])


def _counted(parts: Parts, call: _Call) -> Tensor:
    """The allowed pairs whose query is no padding, bool [batch, heads, query, key]."""
    if call.padding is None:
        return parts.allowed
    num_queries = parts.weights.shape[2]
    return parts.allowed & ~call.padding[:, None, call.start : call.start + num_queries, None]


def _summary(name: str, call: _Call, parts: Parts) -> Observation:
    dtype, rel_v = parts.weights.dtype, call.rel_v
    counted = _counted(parts, call)
    sides: dict[str, Any] = {"max_distance": call.max_distance, "query_start": call.start, "where": counted}
    pairs = by_distance(torch.ones_like(parts.weights), reduction="sum", **sides)
    attention = by_distance(parts.weights, reduction="sum", **sides)

    norms = None if rel_v is None else torch.atleast_2d(rel_v.detach().to(dtype).norm(dim=-1))
    from_values = by_distance(
        parts.weights * call.value.to(dtype).norm(dim=-1)[:, :, None], reduction="sum", **sides
    )
    from_table = torch.zeros_like(attention) if norms is None else attention * norms
    share = from_table / (from_values + from_table).clamp_min(_TINY)
    return Observation(
        layer=name,
        left=call.max_distance[0],
        right=call.max_distance[1],
        query_start=call.start,
        content_logits=parts.content_logits.cpu(),
        position_logits=parts.position_logits.cpu(),
        weights=parts.weights.cpu(),
        allowed=parts.allowed.cpu(),
        pairs=pairs.cpu(),
        content_by_distance=by_distance(parts.content_logits, **sides).cpu(),
        position_by_distance=by_distance(parts.position_logits, **sides).cpu(),
        weight_by_distance=(attention / attention.sum(-1, keepdim=True).clamp_min(_TINY)).cpu(),
        position_share=share.masked_fill(pairs == 0, float("nan")).cpu(),
        rel_v_norms=None if norms is None else norms.cpu(),
        has_rel_k=call.rel_k is not None,
    )
