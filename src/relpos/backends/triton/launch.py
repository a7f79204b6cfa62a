"""Both passes as launches of kernels, and the memory that they need."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from relpos.backends.operator import empty_as
from relpos.backends.triton import sizes, tuning
from relpos.backends.triton.call import (
    Call,
    addressable,
    blocks_of,
    is_traced,
    pair_strides,
    precision,
    split,
    table_strides,
)
from relpos.backends.triton.forward import forward
from relpos.backends.triton.key_value_gradients import key_value_gradients
from relpos.backends.triton.query_gradients import query_gradients
from relpos.backends.triton.tables import prepare, table_gradients


def empty_results(call: Call, keeps_rest: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for what `attend` returns."""
    query = call.query
    out = empty_as(query, query.shape[1], query.shape[2], call.value.shape[3])
    has_rest = keeps_rest and query.dtype.itemsize == 2
    rest = torch.empty_like(out) if has_rest else query.new_empty(0)
    lse = query.new_empty(query.shape[:3], dtype=call.dtype)
    row_stats = lse.new_empty((2, *lse.shape) if call.mask_kind == "float" else 0)
    return out, lse, rest, row_stats


def attend(call: Call, keeps_rest: bool, is_deterministic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention, and what the backward pass needs besides.

    Returns:
        out: [batch, heads, query, d_v], dtype of query.
        lse: [batch, heads, query], in nats.
        rest: where it is to be kept and out has 16 bits, what these cannot hold of it; otherwise empty.
        row_stats: [2, batch, heads, query] under a mask of numbers, otherwise empty.
    """
    out, lse, rest, row_stats = empty_results(call, keeps_rest)
    call = call.for_kernels()
    query, key, value = call.query, call.key, call.value
    batch, heads, num_queries, _ = query.shape
    if call.query.numel() == 0:
        return out, lse, rest, row_stats
    by_label = call.scratch(call.has_tables)
    is_summed = call.relations is not None and call.rel_v is not None
    sums = torch.zeros_like(by_label) if is_summed else by_label
    pointer = call.pointer
    given = (
        *(query, key, value, pointer(call.rel_k), pointer(call.rel_v), pointer(call.relations)),
        *(pointer(call.mask), pointer(call.starts), pointer(call.key_lengths), pointer(call.seed)),
        *(out, rest, lse, row_stats, by_label, sums),
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *table_strides(call.rel_k),
        *table_strides(call.rel_v),
        *pair_strides(call.relations),
        *pair_strides(call.mask),
        *out.stride()[:3],
        *call.numbers(),
    )
    compiled_in = call.compiled_in() | {
        "HAS_REST": rest.numel() > 0,
        "IS_DETERMINISTIC": is_deterministic,
        "BLOCK_L": sizes.LABELS,
        "FEW": sizes.FEW_LABELS,
    }
    _launch(forward, call, num_queries, batch * heads, given, compiled_in)
    return out, lse, rest, row_stats


def _launch(
    kernel: Any, call: Call, length: int, groups: int, given: tuple[Any, ...], compiled_in: dict[str, Any]
) -> None:
    """Launch a kernel that meets pairs: a program for each block of a length, of each of so many groups."""
    name = kernel.fn.__name__
    along = "BLOCK_K" if name == "key_value_gradients" else "BLOCK_Q"
    if tuning.IS_WANTED and not is_traced(call.query):

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (blocks_of(length, meta[along]) * groups,)

        tuning.tuner(name)[grid](*given, **compiled_in)
        return
    size = call.size(name)
    blocks = {"BLOCK_Q": size.queries, "BLOCK_K": size.keys, tuning.near_name(name): size.near}
    wrap_triton(kernel)[(blocks_of(length, blocks[along]) * groups,)](
        *given, **compiled_in, **blocks, num_warps=size.warps, num_stages=size.stages
    )


class Saved(NamedTuple):
    """What the backward pass has besides the arguments."""

    out: Tensor
    lse: Tensor
    rest: Tensor
    row_stats: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def for_kernels(self) -> "Saved":
        """The same laid out as kernels take them, whatever came of it meanwhile."""
        out, rest = addressable(self.out), self.rest
        if rest.numel() and rest.stride() != out.stride():
            out, rest = out.contiguous(), rest.contiguous()
        lse, row_stats = self.lse.contiguous(), self.row_stats.contiguous()
        grad_lse = None if self.grad_lse is None else self.grad_lse.contiguous()
        return Saved(out, lse, rest, row_stats, addressable(self.grad_out), grad_lse)


def gradients(call: Call, saved: Saved, needs: int, is_deterministic: bool) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, rel_k and rel_v; an empty tensor where the bit of needs is not set."""
    tensors = (call.query, call.key, call.value, call.rel_k, call.rel_v)
    is_needed = [x is not None and bool(needs >> i & 1) for i, x in enumerate(tensors)]
    if call.query.numel() == 0:
        return tuple(
            x.new_zeros(x.shape) if x is not None and needed else call.query.new_empty(0)
            for x, needed in zip(tensors, is_needed, strict=True)
        )
    # for all three, needed or not: one kernel writes two of them
    grad_query, grad_key, grad_value = (empty_as(x, *x.shape[1:]) for x in tensors[:3] if x is not None)
    call, saved = call.for_kernels(), saved.for_kernels()
    delta = torch.empty_like(saved.lse)
    logits_by_label, grad_weights_by_label = (call.scratch(x is not None) for x in (call.rel_k, call.rel_v))
    _prepare(call, saved, delta, logits_by_label, grad_weights_by_label)
    scratch = (delta, logits_by_label, grad_weights_by_label)
    if (is_needed[1] or is_needed[2]) and call.key.numel() > 0:
        _find_key_value_gradients(call, saved, *scratch, grad_key, grad_value)
    grad_logit_sums, weight_sums = logits_by_label, grad_weights_by_label
    if call.relations is not None:
        grad_logit_sums, weight_sums = (torch.zeros_like(x) for x in scratch[1:])
    if is_needed[0] or is_needed[3] or is_needed[4]:
        label_sums = (grad_logit_sums, weight_sums)
        _find_query_gradients(call, saved, *scratch, *label_sums, grad_query, is_deterministic)
    grads = [grad_query, grad_key, grad_value]
    for table, x, sums, scale in (
        (call.rel_k, call.query, grad_logit_sums, call.scale),
        (call.rel_v, saved.grad_out, weight_sums, 1.0),
    ):
        if table is None or not is_needed[len(grads)]:
            grads.append(delta.new_empty(0))
        else:
            grads.append(_table_gradient(call, table, x, sums, saved.lse, scale))
    return tuple(
        grad if needed else call.query.new_empty(0) for grad, needed in zip(grads, is_needed, strict=True)
    )


def _prepare(
    call: Call, saved: Saved, delta: Tensor, logits_by_label: Tensor, grad_weights_by_label: Tensor
) -> None:
    query, out, grad_out = call.query, saved.out, saved.grad_out
    batch, heads, num_queries, d_k = query.shape
    d_v = out.shape[3]
    size = sizes.rows(call.kind)
    grid = (blocks_of(num_queries, size.queries) * batch * heads,)
    wrap_triton(prepare)[grid](
        *(query, call.pointer(call.rel_k), call.pointer(call.rel_v), out, saved.rest, grad_out, saved.lse),
        *(call.pointer(saved.grad_lse), delta, logits_by_label, grad_weights_by_label),
        *query.stride(),
        *table_strides(call.rel_k),
        *table_strides(call.rel_v),
        *out.stride(),
        *grad_out.stride(),
        *(heads, num_queries, call.num_labels, call.row_width, *split(call.scale)),
        D_K=d_k,
        D_V=d_v,
        HAS_REL_K=call.rel_k is not None,
        HAS_REL_V=call.rel_v is not None,
        HAS_REST=saved.rest.numel() > 0,
        HAS_GRAD_LSE=saved.grad_lse is not None,
        MASK=call.mask_kind,
        PRECISION=precision(),
        PADDED_K=sizes.padded(d_k),
        PADDED_V=sizes.padded(d_v),
        BLOCK_Q=size.queries,
        BLOCK_L=sizes.LABELS,
        num_warps=size.warps,
        num_stages=size.stages,
    )


def _pair_tensors(call: Call) -> tuple[Tensor | None, ...]:
    others = (call.relations, call.mask, call.starts, call.key_lengths, call.seed)
    return tuple(call.pointer(x) for x in others)


def _find_key_value_gradients(
    call: Call,
    saved: Saved,
    delta: Tensor,
    logits_by_label: Tensor,
    grad_weights_by_label: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    query, key, value, grad_out = call.query, call.key, call.value, saved.grad_out
    given = (
        *(query, key, value, *_pair_tensors(call), grad_out, saved.lse, saved.row_stats, delta),
        *(logits_by_label, grad_weights_by_label, grad_key, grad_value),
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *pair_strides(call.relations),
        *pair_strides(call.mask),
        *grad_out.stride(),
        *grad_key.stride()[:3],
        *grad_value.stride()[:3],
        *call.numbers(),
    )
    _launch(key_value_gradients, call, key.shape[2], key.shape[0] * key.shape[1], given, call.compiled_in())


def _find_query_gradients(
    call: Call,
    saved: Saved,
    delta: Tensor,
    logits_by_label: Tensor,
    grad_weights_by_label: Tensor,
    grad_logit_sums: Tensor,
    weight_sums: Tensor,
    grad_query: Tensor,
    is_deterministic: bool,
) -> None:
    query, key, value, grad_out = call.query, call.key, call.value, saved.grad_out
    batch, heads, num_queries, _ = query.shape
    given = (
        *(query, key, value, call.pointer(call.rel_k), *_pair_tensors(call), grad_out, saved.lse),
        *(saved.row_stats, delta, logits_by_label, grad_weights_by_label),
        *(grad_logit_sums, weight_sums, grad_query),
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *table_strides(call.rel_k),
        *pair_strides(call.relations),
        *pair_strides(call.mask),
        *grad_out.stride(),
        *grad_query.stride()[:3],
        *call.numbers(),
    )
    compiled_in = call.compiled_in() | {
        "IS_DETERMINISTIC": is_deterministic,
        "BLOCK_L": sizes.LABELS,
        "FEW": sizes.FEW_LABELS,
    }
    _launch(query_gradients, call, num_queries, batch * heads, given, compiled_in)


def _table_gradient(call: Call, table: Tensor, x: Tensor, sums: Tensor, lse: Tensor, scale: float) -> Tensor:
    batch, heads, num_queries, width = x.shape
    is_per_head = table.dim() == 3
    num_tables = heads if is_per_head else 1
    num_groups = batch * heads // num_tables
    size = sizes.rows(call.kind)
    num_parts = sizes.num_parts(num_groups * blocks_of(num_queries, size.queries), num_tables)
    parts = x.new_empty((num_parts, num_tables, call.num_labels, width), dtype=call.dtype)
    grid = (blocks_of(call.num_labels, size.keys) * num_parts * num_tables,)
    wrap_triton(table_gradients)[grid](
        *(x, sums, lse, parts),
        *x.stride(),
        *(heads, num_groups, num_queries, call.num_labels, call.row_width, num_parts, *split(scale)),
        WIDTH=width,
        PADDED=sizes.padded(width),
        IS_PER_HEAD=is_per_head,
        PRECISION=precision(),
        BLOCK_Q=size.queries,
        BLOCK_L=size.keys,
        num_warps=size.warps,
        num_stages=size.stages,
    )
    return parts.sum(0).view(table.shape).to(table.dtype)
