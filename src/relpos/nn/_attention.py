"""Multi-head attention with relative positions as a module: projections, tables, masks, cache.

The tables are the paper's a^K and a^V (section 3.2), shared by the heads by default (as in its big model) or
one per head (as in its base model). The module computes attention with `relpos.relative_attention`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos._dispatch import check_backend
from relpos._functional import attention_with_weights, relative_attention
from relpos._inputs import check_start
from relpos.nn._arguments import (
    REQUIRED,
    Required,
    check_cache,
    check_count,
    check_flag,
    check_heads,
    check_probability,
    check_sequence,
    check_together,
    refuse_appended_keys,
    sides_of,
)
from relpos.nn._cache import AttentionCache, KeyValueCache, StaticKeyValueCache
from relpos.nn._cache_positions import check_filled, check_memory, check_use, chunk_positions
from relpos.nn._masks import check_masks, merge_masks
from relpos.nn._nested_tensors import are_nested_alike, nested_like, padded
from relpos.nn._projections import Projections
from relpos.nn._projections import shapes as projection_shapes

_TABLES = ("relative_position_keys", "relative_position_values")


class RelativeMultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with relative positions.

    Args:
        embed_dim: width of the model; `num_heads` must divide it.
        num_heads: heads, each of width embed_dim / num_heads.
        dropout: probability on the attention weights while training.
        bias: whether the four projections have biases.
        add_bias_kv, add_zero_attn: must be False, since an appended key has no position.
        kdim, vdim: widths of key and value. None means embed_dim.
        batch_first: whether tensors are [batch, length, embed_dim]; otherwise [length, batch, embed_dim].
        max_distance: k, or (left, right), in tokens; distances beyond share one row. Required: None means no
            relative positions, as in cross-attention.
        relative_keys: whether to add relative positions to the keys (equation 4).
        relative_values: whether to add relative positions to the values (equation 3).
        relative_per_head: whether each head has its own tables.
        backend: name of a backend, as in `relpos.relative_attention`; "dense" has second derivatives. The
            attribute `backend` can be changed later.

    Parameters `relative_position_keys` and `relative_position_values` are [labels, d_k], or
    [heads, labels, d_k] per head, with labels = left + right + 1; row `left` is distance 0. All other
    parameters have the names and shapes of `torch.nn.MultiheadAttention`. Its state dict loads; the tables
    then keep their values. Tables are initialized Xavier-uniform: the paper does not state its choice.
    `bias_k` and `bias_v` are None, and `add_zero_attn` is False.

    Raises:
        ValueError: a size, probability or distance is out of range, or no backend has this name.
        TypeError: max_distance is missing, or an argument has the wrong type.
    """

    # torch's own code reads it
    add_zero_attn = False

    bias_k: None
    bias_v: None
    in_proj_weight: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    relative_position_keys: Tensor | None
    relative_position_values: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_distance: int | tuple[int, int] | Required | None = REQUIRED,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_probability("dropout", dropout)
        refuse_appended_keys(add_bias_kv, add_zero_attn)
        check_backend(backend)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        for name, width in (("kdim", self.kdim), ("vdim", self.vdim)):
            check_count(name, width)
        self.dropout = dropout
        self.batch_first = batch_first
        self.max_distance = sides_of(self, max_distance)
        self.backend = backend

        options: Any = {"device": device, "dtype": dtype}
        for name, shape in projection_shapes(embed_dim, self.kdim, self.vdim, bias).items():
            parameter = None if shape is None else nn.Parameter(torch.empty(shape, **options))
            self.register_parameter(name, parameter)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)

        labels = 0 if self.max_distance is None else sum(self.max_distance) + 1
        table_shape = (num_heads, labels, self.head_dim) if relative_per_head else (labels, self.head_dim)
        for name, is_wanted in zip(_TABLES, (relative_keys, relative_values), strict=True):
            table = nn.Parameter(torch.empty(table_shape, **options)) if labels and is_wanted else None
            self.register_parameter(name, table)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, None)
        # in torch.nn: whether in_proj_weight holds all three. torch.nn.TransformerEncoderLayer then computes
        # attention from it, without positions; so it is False where there are any
        self._qkv_same_embed_dim = self.in_proj_weight is not None and not self.is_relative
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights and tables Xavier-uniform, and biases with zeros.

        `torch.nn.MultiheadAttention` differs in `out_proj.weight`, which starts as in `nn.Linear`.
        """
        packed, separate = self.in_proj_weight, (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in (packed, *separate, self.out_proj.weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for table in (self.relative_position_keys, self.relative_position_values):
            if table is not None:
                # xavier_uniform_ of one head's [labels, d_k]
                limit = math.sqrt(6 / (table.shape[-2] + table.shape[-1]))
                nn.init.uniform_(table, -limit, limit)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        query_start: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key`, with the masks of `torch.nn.MultiheadAttention`.

        In bool masks True = hidden, as in torch.nn. In `relative_attention`, as in SDPA, True = may attend;
        in the `attention_mask` of Hugging Face's tokenizers 1 = keep.

        Args:
            query: [batch, query, embed_dim] if batch_first, else [query, batch, embed_dim]; or one sequence
                [query, embed_dim], in which case no other argument has a batch.
            key, value: likewise with `key` tokens, of width kdim and vdim. With relative positions, a query
                and a key of the same length are taken as tokens of the same sequence, even in different
                tensors. For cross-attention use a module with max_distance=None.
            key_padding_mask: [batch, key], bool (True = padding) or float, added to the logits. From an
                integer mask with 1 = keep, make it by `mask == 0`. With a cache, `key` counts all its
                tokens, this chunk included. With a static cache it may be the capacity, and must be under
                `torch.compile`.
            need_weights: whether to return the weights. They take memory [batch, heads, query, key], and
                the backend "dense" computes them.
            attn_mask: [query, key] or [batch * heads, query, key], bool (True = may not attend) or float.
            average_attn_weights: whether to average the weights over the heads.
            is_causal: hide keys after the query; needs no attn_mask.
            cache: keys and values of earlier chunks, to which this chunk is appended; or those of a memory.
            query_start: position of the first query among the keys, including those of a cache, in tokens:
                an int or integers [batch]. Default: the position of the first key of this chunk. Required
                with relative positions if query and key differ in length: `n - 1` for the last of n tokens.
        Returns:
            Output, shaped like query, and the weights before dropout: [batch, query, key], or
            [batch, heads, query, key] unless averaged; None unless need_weights.
        Raises:
            ValueError: shapes or devices disagree; or relative positions with the cache of a memory, or with
                different lengths and no query_start.
            TypeError: an argument has the wrong type or dtype.
        """
        is_alone = attn_mask is None and key_padding_mask is None and cache is None
        if is_alone and self.batch_first and are_nested_alike(query, key, value):
            # torch.nn.TransformerEncoder passes nested tensors
            query, key, value, padding = padded(query, key, value)
            out, weights = self.forward(
                query,
                key,
                value,
                padding,
                need_weights,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
                query_start=query_start,
            )
            return nested_like(out, padding), weights
        self._check(query, key, value, is_causal, cache, query_start)
        positions = chunk_positions(cache, self.num_tokens(key), query_start)
        check_masks(
            ("attn_mask", "key_padding_mask"),
            (attn_mask, key_padding_mask),
            query=query,
            batch_first=self.batch_first,
            num_heads=self.num_heads,
            num_keys=positions.num_keys,
            has_cache=cache is not None,
        )
        is_batch = query.dim() == 3
        query, key, value = self.batches(query, key, value)
        if query_start is not None:
            check_start(query_start, query)
        q, k, v = self._heads(query, key, value, cache)
        mask = merge_masks(attn_mask, key_padding_mask, batch=q.shape[0], num_heads=self.num_heads)
        k, v, limits = positions.trim(k, v, mask)
        limits |= {"is_causal": is_causal, "max_distance": self.max_distance if self.is_relative else None}
        rel_k, rel_v = self.relative_position_keys, self.relative_position_values
        limits["dropout_p"] = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            heads, weights = attention_with_weights(q, k, v, rel_k, rel_v, **limits)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = relative_attention(q, k, v, rel_k, rel_v, backend=self.backend, **limits)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))  # [batch, query, embed_dim]
        if not is_batch:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    @property
    def is_relative(self) -> bool:
        """Whether the module has a table of relative positions."""
        return self.relative_position_keys is not None or self.relative_position_values is not None

    @property
    def any_weight(self) -> Tensor:
        """One of the weights, which tells dtype and device."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        assert weight is not None
        return weight

    def make_cache(
        self, *, batch: int | None = None, capacity: int | None = None
    ) -> KeyValueCache | StaticKeyValueCache:
        """An empty cache for self-attention: one that grows, or a static one if batch and capacity are given.

        Args:
            capacity: the largest number of tokens.
        Raises:
            ValueError: only one of the two is given, or one is below 1. TypeError: one is no integer.
        """
        if (batch is None) != (capacity is None):
            raise ValueError(
                f"batch and capacity must be given together; got batch={batch}, capacity={capacity}. "
                "Omit both for a cache that grows."
            )
        if batch is None or capacity is None:
            return KeyValueCache()
        options: Any = {"device": self.any_weight.device, "dtype": self.any_weight.dtype}
        return StaticKeyValueCache(batch, self.num_heads, capacity, self.head_dim, **options)

    def num_tokens(self, x: Tensor) -> int:
        """The length of [batch, length, width], or [length, batch, width], or [length, width]."""
        return x.shape[1] if x.dim() == 3 and self.batch_first else x.shape[0]

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """`torch.nn.MultiheadAttention.merge_masks`: `torch.nn.TransformerEncoderLayer` calls it."""
        theirs: Any = nn.MultiheadAttention.merge_masks
        return theirs(self, attn_mask, key_padding_mask, query)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project query, key, value [batch, length, width] to [batch, heads, length, head_dim]."""
        return self._projections().all(query, key, value)

    def extra_repr(self) -> str:
        """The settings shown when the module is printed."""
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        if not self.is_relative:
            return f"{sizes}, no relative positions"
        tables = (self.relative_position_keys, self.relative_position_values)
        names = [name for name, table in zip(("keys", "values"), tables, strict=True) if table is not None]
        rank = next(table.dim() for table in tables if table is not None)
        relative = f"max_distance={self.max_distance}, relative {' and '.join(names)}"
        return f"{sizes}, {relative}{', per head' if rank == 3 else ''}"

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this on each module inside the one that it is given."""
        raise TypeError(
            "torch.jit.script cannot compile RelativeMultiheadAttention, since caches are objects of Python. "
            "Use torch.export or torch.compile, or torch.jit.trace."
        )

    def _projections(self) -> Projections:
        separate = None
        if self.in_proj_weight is None:
            assert self.q_proj_weight is not None
            assert self.k_proj_weight is not None
            assert self.v_proj_weight is not None
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return Projections(self.in_proj_weight, separate, self.in_proj_bias, self.num_heads)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        cache: AttentionCache | None,
        query_start: int | Tensor | None,
    ) -> None:
        weight, batch_first = self.any_weight, self.batch_first
        widths = {"embed_dim": self.embed_dim, "kdim": self.kdim, "vdim": self.vdim}
        named = (("query", query), ("key", key), ("value", value))
        for (name, x), (width_name, width) in zip(named, widths.items(), strict=True):
            if name == "query" or x is not query or width != self.embed_dim:
                check_sequence(name, x, weight, width=width, width_name=width_name, batch_first=batch_first)
        check_flag("is_causal", is_causal)
        check_cache("cache", cache)
        num_keys = self.num_tokens(key)
        check_use(self.is_relative, self.num_tokens(query), num_keys, query_start, is_causal, cache)
        check_memory("key", num_keys, "cache", cache)
        # a filled memory cache replaces key and value
        if key is not query and (cache is None or cache.filled_memory() is None):
            check_together("key", key, "query", query, batch_first=batch_first)
        if value is not key:
            check_together("value", value, "key", key, batch_first=batch_first, has_one_length=True)

    def batches(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value as [batch, length, width]; a shared tensor stays shared."""

        def turned(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return x.unsqueeze(0)
            return x if self.batch_first else x.transpose(0, 1)

        is_self, is_kv = query is key and key is value, key is value
        query = turned(query)
        key = query if is_self else turned(key)
        return query, key, key if is_kv else turned(value)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, cache: AttentionCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected query, and keys and values including those of the cache."""
        memory = None if cache is None else cache.filled_memory()
        if memory is not None:
            if memory[0].shape[0] != query.shape[0]:
                raise ValueError(
                    f"cache must have the batch size of query = {query.shape[0]}; got {memory[0].shape[0]}. "
                    "Reorder it, or use an empty cache."
                )
            return self._projections().query(query), *memory
        q, k, v = self.project(query, key, value)
        if cache is not None:
            num_keys = k.shape[2]
            k, v = cache.append(k, v)
            check_filled(k, num_keys, cache)
        return q, k, v

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        lists = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        tables = [prefix + name for name in _TABLES]
        is_torchs = f"{prefix}out_proj.weight" in state_dict and not any(
            name in state_dict for name in tables
        )
        # tables on the meta device have no values to keep
        is_kept = not any(getattr(x, "is_meta", False) for x in self._parameters.values())
        if is_torchs and is_kept:
            missing_keys[:] = [name for name in missing_keys if name not in tables]
