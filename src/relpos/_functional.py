"""Attention with relative positions (paper, section 3.2) and over labelled pairs (section 3.1) as functions.

The door to the backends.
"""

from typing import Literal, overload

from torch import Tensor

from relpos._dispatch import BackendTable, dispatch, dispatch_with_weights, explain
from relpos._inputs import check, no_labels


@overload
def relative_attention(
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
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def relative_attention(
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
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def relative_attention(
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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with a learned vector for each distance between query and key.

        out[i] = sum_j w[i,j] (value[j] + rel_v[r(i,j)])
        w[i]   = softmax_j( scale * query[i] . (key[j] + rel_k[r(i,j)]) )
        r(i,j) = clip(j - (query_start + i), -left, right) + left

    Args:
        query: [batch, heads, query, d_k]. float64, float32, bfloat16 or float16. Under autocast query, key
            and value are converted to its dtype, but for float64, as by `scaled_dot_product_attention`, and
            tables are not.
        key: [batch, heads or fewer, key, d_k], dtype of query. Its heads divide those of query, and each
            serves as many query heads in a row (grouped-query attention).
        value: [batch, heads of key, key, d_v], dtype of query.
        rel_k: [labels, d_k], or [heads, labels, d_k], or None. Row `left` is distance 0, row 0 is "left or
            more before the query", the last row is "right or more after it". May be float32 beside bfloat16.
        rel_v: [labels, d_v], or [heads, labels, d_v], or None. May be the same tensor as rel_k.
        max_distance: k, or (left, right), in tokens; labels = left + right + 1. Default: symmetric, read off
            the tables.
        query_start: position of the first query among the keys, in tokens, an int or integers
            [batch]. May be left out only where query and key have one length, and is then 0.
        attn_mask: broadcastable to [batch, heads, query, key]. bool, True = may attend, as in
            `scaled_dot_product_attention`, or float, added to the scaled logits. In the masks of `relpos.nn`,
            as in those of `torch.nn`, True = hidden.
        key_lengths: integers [batch]. Keys from that index on do not exist, whatever they hold.
        is_causal: whether a query attends to keys up to its own position only, j <= query_start + i.
        dropout_p: probability of dropping a weight. What is dropped is missing from both value terms.
        scale: factor on the logits, content and relative parts alike. Default 1/sqrt(d_k).
        return_lse: whether to return the log of the sum of exp(logits) as well, in nats.
        backend: name of a backend, or "reference". Default: the first that fits, see `explain_backends`.
    Returns:
        [batch, heads, query, d_v], dtype of query. A query with no key gets zeros.
        With return_lse a pair of that and [batch, heads, query] in float32 or float64, -inf for a query
        with no key.
    Raises:
        ValueError: shapes, devices or ranges disagree. TypeError: a kind or dtype that is not taken.
        NotImplementedError: no backend fits, or the named one does not.
    Source: Shaw et al. 2018, eq. 3-4; differs in allowing left != right.
    """
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        max_distance=max_distance,
        query_start=query_start,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
    )
    out, lse = dispatch(inputs, backend)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attention_with_weights(
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
) -> tuple[Tensor, Tensor]:
    """What `relative_attention` returns, and the weights with which it attends.

        w[i] = softmax_j( scale * query[i] . (key[j] + rel_k[r(i,j)]) )

    Args:
        query, key, value, rel_k, rel_v, and the keywords: as in `relative_attention`. The backend is "dense",
            the only one that has all weights at one time.
    Returns:
        [batch, heads, query, d_v], and the weights before dropout, [batch, heads, query, key], both in the
        dtype of query. A query with no key gets zeros.
    Raises:
        ValueError, TypeError: as `relative_attention`.
    Source: Shaw et al. 2018, eq. 3-4.
    """
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        max_distance=max_distance,
        query_start=query_start,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return dispatch_with_weights(inputs)


@overload
def relation_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relations: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def relation_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relations: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def relation_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relations: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with a learned vector for the label of each pair of query and key.

        out[i] = sum_j w[i,j] (value[j] + rel_v[relations[i,j]])
        w[i]   = softmax_j( scale * query[i] . (key[j] + rel_k[relations[i,j]]) )

    The tokens are the nodes of a graph in which each pair has a labelled edge; distance is one labelling, and
    `relpos.relations` makes others. Nothing is causal and no length need equal another.

    Args:
        query, key, value, attn_mask, key_lengths, dropout_p, scale, return_lse, backend: as in
            `relative_attention`.
        relations: integers broadcastable to [batch, heads, query, key]: the row of each pair in both tables.
            -1 is no relation: the pair attends as any other, with a vector of zeros. Where the labels are
            [batch, query, key], give relations[:, None].
        rel_k: [labels, d_k], or [heads, labels, d_k], or None. May be float32 beside bfloat16.
        rel_v: [labels, d_v], or [heads, labels, d_v], or None. May be the same tensor as rel_k.
    Returns:
        [batch, heads, query, d_v], dtype of query, and with return_lse a pair; as `relative_attention`.
    Raises:
        ValueError: shapes, devices or ranges disagree, a label among them. TypeError: a kind or dtype that is
            not taken. NotImplementedError: no backend fits, or the named one does not.
    Source: Shaw et al. 2018, section 3.1, eq. 3-4; differs in letting a pair have no relation.
    """
    if relations is None:
        raise no_labels(relations)
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        relations=relations,
    )
    out, lse = dispatch(inputs, backend)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def explain_backends(
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
    relations: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> BackendTable:
    """The reasons against each backend for arguments of `relative_attention`; computes nothing.

    Args:
        relations: labels for each pair: then the question is about `relation_attention`, and max_distance,
            query_start and is_causal must be left out.
    Returns:
        A dict from the name of a backend to its list of reasons, in the order in which they are tried; an
        empty list means that it fits. `.chosen` is the name of the one that is taken: the first that fits,
        unless it leaves such sizes to a faster one. str() is a table to read.
    Raises:
        ValueError, TypeError: as `relative_attention` or `relation_attention`.
    """
    inputs = check(
        query,
        key,
        value,
        rel_k,
        rel_v,
        max_distance=max_distance,
        query_start=query_start,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        relations=relations,
    )
    return explain(inputs)
