"""Multi-head attention with relative positions as a module: projections, tables, masks, cache.

The tables are the paper's a^K and a^V (section 3.2), shared over the heads by default (its big model)
or one per head (its base model). The mathematics is `relpos.relative_attention`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.functional import relative_attention
from relpos.nn.cache import AttentionCache
from relpos.positions import two_sides


class RelativeMultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` whose tokens know how far apart they stand.

    Args:
        embed_dim: width of the model; `num_heads` must divide it.
        num_heads: heads, each of width embed_dim / num_heads.
        dropout: probability on the attention weights while training.
        bias: whether the four projections have biases.
        batch_first: whether tensors are [batch, length, embed_dim]; otherwise [length, batch, embed_dim].
        max_distance: k, or (left, right): distances beyond share one row. None: no relative positions.
        relative_keys: whether distances act on the keys (equation 4).
        relative_values: whether distances act on the values (equation 3).
        relative_per_head: whether each head has tables of its own.

    Parameters `relative_position_keys` and `relative_position_values` are [labels, d_k], or
    [heads, labels, d_k] per head, with labels = left + right + 1; row `left` is distance 0. The other
    names and shapes are those of `torch.nn.MultiheadAttention`. Tables start Xavier-uniform: the paper
    does not say how its own did.

    Raises:
        ValueError: num_heads does not divide embed_dim, or max_distance is negative.
        TypeError: max_distance is none of these.
    """

    in_proj_bias: Tensor | None
    relative_position_keys: Tensor | None
    relative_position_values: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        max_distance: int | tuple[int, int] | None = None,
        relative_keys: bool = True,
        relative_values: bool = True,
        relative_per_head: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim = {embed_dim}; got {num_heads}. Change one of them."
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.max_distance = two_sides(max_distance)

        options: dict = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **options))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **options)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)

        labels = 0 if self.max_distance is None else sum(self.max_distance) + 1
        shape = (num_heads, labels, self.head_dim) if relative_per_head else (labels, self.head_dim)
        self.relative_position_keys = (
            nn.Parameter(torch.empty(shape, **options)) if labels and relative_keys else None
        )
        self.relative_position_values = (
            nn.Parameter(torch.empty(shape, **options)) if labels and relative_values else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as `torch.nn.MultiheadAttention` does, and new tables."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
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
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key`, with the masks of `torch.nn.MultiheadAttention` (True = hidden).

        Args:
            query: [batch, query, embed_dim] if batch_first, else [query, batch, embed_dim].
            key, value: likewise with `key` tokens. With relative positions all three are one tensor.
            key_padding_mask: [batch, key], bool (True = padding) or float, added. With a cache, `key`
                counts all tokens held, this chunk included.
            need_weights: whether to return the weights too; it costs a second pass.
            attn_mask: [query, key] or [batch * heads, query, key], bool (True = may not attend) or float.
            average_attn_weights: whether weights are averaged over the heads.
            is_causal: hide keys after the query; needs no attn_mask. Without a cache the first query
                stands at the first key.
            cache: keys and values of earlier chunks, to which this chunk is appended; or of the memory.
        Returns:
            Output shaped like query, and the weights before dropout, [batch, query, key] or
            [batch, heads, query, key], or None.
        Raises:
            ValueError: an input has no batch dimension; relative positions are asked for between different
                tensors or with the cache of a memory; is_causal is asked for with the cache of a memory.
        """
        self._check(query, key, value, is_causal, cache)
        # in cross-attention the position of a query has no effect, unless causal
        query_start = 0 if cache is None or cache.is_memory else cache.length
        if not self.batch_first:
            is_self, is_kv = query is key and key is value, key is value
            query = query.transpose(0, 1)
            key = query if is_self else key.transpose(0, 1)
            value = key if is_kv else value.transpose(0, 1)

        q, k, v = self._heads(query, key, value, cache)
        mask = self.merge_masks(attn_mask, key_padding_mask, batch=q.shape[0])
        positions: dict = {
            "max_distance": self.max_distance if self.is_relative else None,
            "query_start": query_start,
            "attn_mask": mask,
            "is_causal": is_causal,
        }
        rel_k, rel_v = self.relative_position_keys, self.relative_position_values
        dropout_p = self.dropout if self.training else 0.0
        heads = relative_attention(q, k, v, rel_k, rel_v, dropout_p=dropout_p, **positions)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))  # [batch, query, embed_dim]

        weights = None
        if need_weights:
            # attention over unit vectors, with no table on the values, returns its own weights
            unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
            weights = relative_attention(q, k, unit, rel_k, None, **positions)
            weights = weights.mean(1) if average_attn_weights else weights
        return out if self.batch_first else out.transpose(0, 1), weights

    @property
    def is_relative(self) -> bool:
        """Whether the module has a table of relative positions."""
        return self.relative_position_keys is not None or self.relative_position_values is not None

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From [batch, length, embed_dim] each to the heads, [batch, heads, length, head_dim] each."""
        width, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if query is key and key is value:
            packed = F.linear(query, weight, bias).unflatten(-1, (3, self.num_heads, self.head_dim))
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        q = self._project_query(query)
        if key is value:
            rows = F.linear(key, weight[width:], None if bias is None else bias[width:])
            k, v = rows.unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        w_k, w_v = weight[width:].chunk(2)
        b_k, b_v = (None, None) if bias is None else bias[width:].chunk(2)
        return q, self._split(F.linear(key, w_k, b_k)), self._split(F.linear(value, w_v, b_v))

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, *, batch: int
    ) -> Tensor | None:
        """torch.nn's two masks (bool: True = hidden) as one of SDPA's (bool: True = may attend)."""
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]]
        given = [mask for mask in masks if mask is not None]
        if not given:
            return None
        if all(mask.dtype == torch.bool for mask in given):
            hidden = given[0] if len(given) == 1 else given[0] | given[1]
            return ~hidden
        dtype = next(mask.dtype for mask in given if mask.dtype != torch.bool)
        added = [
            torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
            if mask.dtype == torch.bool
            else mask
            for mask in given
        ]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, cache: AttentionCache | None
    ) -> None:
        if not query.dim() == key.dim() == value.dim() == 3:
            raise ValueError(
                f"query, key and value must have 3 dimensions; got {_shapes(query, key, value)}. "
                f"Give one sequence as a batch of one: x.unsqueeze({0 if self.batch_first else 1})."
            )
        # by identity: sequences of one length are no less two sequences
        if self.is_relative and not (query is key and key is value):
            raise ValueError(
                "relative positions belong to self-attention: query, key and value must be one tensor, as in "
                f"attention(x, x, x); got different ones, {_shapes(query, key, value)}. "
                "Use max_distance=None for cross-attention."
            )
        if cache is None or not cache.is_memory:
            return
        if self.is_relative:
            raise ValueError(
                "relative positions belong to self-attention, and a cache with is_memory=True to "
                "cross-attention. Give KeyValueCache(), or use max_distance=None."
            )
        if is_causal:
            raise ValueError(
                "is_causal cannot be used with a cache of a memory, which does not know where the query "
                "stands. Give attn_mask."
            )

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, cache: AttentionCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query of each head, and keys and values with those that the cache holds."""
        memory = None if cache is None else cache.filled_memory()
        if memory is not None:
            return self._project_query(query), *memory
        q, k, v = self.project(query, key, value)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _project_query(self, query: Tensor) -> Tensor:
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        return self._split(F.linear(query, self.in_proj_weight[: self.embed_dim], bias))

    def _split(self, x: Tensor) -> Tensor:
        """[batch, length, embed_dim] to [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        """The settings that print with the module."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, max_distance={self.max_distance}"


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(x.shape)) for x in tensors)
