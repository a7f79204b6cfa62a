"""Every argument of attention in one object, checked.

The one place where shapes, dtypes, devices, ranges and combinations are looked at: what leaves `check` is
right, so backends and the reference ask no questions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from relpos._inputs.numbers import checked_dropout, checked_flag, checked_scale
from relpos._inputs.pairs import checked_mask, checked_relations
from relpos._inputs.sequences import checked_lengths, checked_start
from relpos._inputs.tensors import cast, check_kinds, check_shapes, check_table
from relpos._positions import resolve_max_distance


@dataclass(frozen=True)
class Inputs:
    """The arguments of `relative_attention` or `relation_attention`, normalised; see there for meanings.

    Where `relations` holds the row of each pair, or -1 for none, distances mean nothing: `left` is 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None
    left: int
    right: int
    query_start: int | Tensor
    attn_mask: Tensor | None  # always four dimensions
    key_lengths: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    return_lse: bool
    relations: Tensor | None = None  # always four dimensions

    @property
    def num_labels(self) -> int:
        """Rows of the tables."""
        return self.left + self.right + 1

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head; 1 for plain multi-head attention."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 where a tensor is float64: the dtype in which sums are kept."""
        # key and value have the dtype of query
        for x in (self.query, self.rel_k, self.rel_v):
            if x is not None and x.dtype == torch.float64:
                return torch.float64
        return torch.float32


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    max_distance: int | tuple[int, int] | None = None,
    query_start: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    relations: Tensor | None = None,
) -> Inputs:
    """The arguments of `relative_attention`, or with relations of `relation_attention`, as one object.

    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
    """
    check_kinds(query, key, value, rel_k, rel_v)
    check_shapes(query, key, value)
    check_table("rel_k", rel_k, query.shape[1], "d_k", query.shape[3])
    check_table("rel_v", rel_v, query.shape[1], "d_v", value.shape[3])
    rows_k, rows_v = (None if x is None else x.shape[-2] for x in (rel_k, rel_v))
    query, key, value = cast(query, key, value)
    if relations is None:
        left, right = resolve_max_distance(max_distance, rows_k, rows_v)
        start = checked_start(query_start, query, key)
    else:
        if max_distance is not None or query_start is not None or is_causal:
            raise ValueError(
                "max_distance, query_start and is_causal must be left out beside relations, which take the "
                "place of distances. For a causal mask give attn_mask."
            )
        left, right, start = 0, _last_label(rows_k, rows_v), 0
        has_tables = rel_k is not None or rel_v is not None
        relations = checked_relations(relations, right + 1 if has_tables else None, query, key)
    return Inputs(
        query=query,
        key=key,
        value=value,
        rel_k=rel_k,
        rel_v=rel_v,
        left=left,
        right=right,
        query_start=start,
        attn_mask=checked_mask(attn_mask, query, key),
        key_lengths=checked_lengths(key_lengths, query, key),
        is_causal=checked_flag("is_causal", is_causal),
        dropout_p=checked_dropout(dropout_p),
        scale=checked_scale(scale, query.shape[3]),
        return_lse=checked_flag("return_lse", return_lse),
        relations=relations,
    )


def _last_label(rel_k_rows: int | None, rel_v_rows: int | None) -> int:
    """The last row of the tables; 0 where there are none."""
    if rel_k_rows is None or rel_v_rows is None:
        return (rel_k_rows or rel_v_rows or 1) - 1
    if rel_k_rows != rel_v_rows:
        raise ValueError(
            f"rel_v must have as many rows as rel_k = {rel_k_rows}; got {rel_v_rows}. "
            "Both tables have one row for each label."
        )
    return rel_k_rows - 1
