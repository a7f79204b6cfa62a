"""The gradients of `forward.attend`, from what it kept.

In shapes, near = distances between the far regions.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.backends.merged import far
from relpos.backends.merged.far import QKV
from relpos.backends.merged.forward import add_near_logits, relative_logits
from relpos.backends.merged.partition import Piece, pieces
from relpos.backends.merged.problem import Problem


class Saved(NamedTuple):
    """The results of `forward.attend`, and the gradients of the first two."""

    out: Tensor
    lse: Tensor
    far_weights: Tensor
    far_out: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


class _Totals(NamedTuple):
    """Sums of gradients, as wide as the tensors of a piece, in the dtype of the sums."""

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor | None
    rel_v: Tensor | None


def gradients(problem: Problem, saved: Saved, needs: int) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, rel_k and rel_v; an empty tensor where the bit of needs is not set."""
    given = problem.differentiable
    if saved.grad_lse is not None:
        problem, saved = _with_lse_in_out(problem, saved, saved.grad_lse)
    width = problem.width

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], width), dtype=problem.dtype)

    totals = _Totals(
        # all three, needed or not: the fused kernel finds them together
        *(zeros(problem.query), zeros(problem.key), zeros(problem.value)),
        rel_k=zeros(problem.rel_k) if problem.rel_k is not None and needs >> 3 & 1 else None,
        rel_v=zeros(problem.rel_v) if problem.rel_v is not None and needs >> 4 & 1 else None,
    )
    for piece in pieces(problem):
        if piece.place.num_keys > 0:
            _add_gradients(piece, saved, totals)
    return tuple(
        total[..., : x.shape[-1]].to(x.dtype).contiguous()
        if x is not None and total is not None and needs >> i & 1
        else problem.query.new_empty(0)
        for i, (x, total) in enumerate(zip(given, totals, strict=True))
    )


def _with_lse_in_out(problem: Problem, saved: Saved, grad_lse: Tensor) -> tuple[Problem, Saved]:
    """The gradient of lse as that of one more column of out, of which each value holds 0 and out holds -1.

    The gradient of a logit is weight * (grad_out . value - grad_out . out), so that column adds weight times
    the gradient of lse, which is what lse asks for.
    """
    # a gradient of lse may be larger than half precision holds
    dtype = problem.dtype
    problem = problem._replace(
        query=problem.query.to(dtype),
        key=problem.key.to(dtype),
        value=F.pad(problem.value.to(dtype), (0, 1)),
        rel_v=None if problem.rel_v is None else F.pad(problem.rel_v, (0, 1)),
    )
    return problem, saved._replace(
        out=F.pad(saved.out.to(dtype), (0, 1), value=-1.0),
        far_out=F.pad(saved.far_out.to(dtype), (0, 1)),
        grad_out=torch.cat((saved.grad_out.to(dtype), grad_lse[..., None]), -1),
    )


def _add_gradients(piece: Piece, saved: Saved, totals: _Totals) -> None:
    place = piece.place
    out, grad_out = (piece.widened(place.in_queries(x)).to(piece.dtype) for x in (saved.out, saved.grad_out))
    lse = place.in_queries(saved.lse)
    logits = relative_logits(piece)  # [batch, heads, query, row]
    far_lse = {row: lse - logits[..., row] for row in piece.regions}
    add_near_logits(piece, logits)
    weights = logits.sub_(lse[..., None]).exp_()
    far_weights, far_out = place.in_queries(saved.far_weights), place.in_queries(saved.far_out)
    for i, row in enumerate(piece.regions):
        weights[..., row] = far_weights[..., i]
    grad_logits = _grad_weights(piece, grad_out).mul_(weights)
    for i, row in enumerate(piece.regions):
        grad_logits[..., row].add_((grad_out * piece.widened(far_out[..., i, :])).sum(-1))
    # grad_out . out, from the parts and not from out, whose rounding would not cancel in half precision
    common = grad_logits.sum(-1)
    if saved.grad_lse is not None:
        common -= place.in_queries(saved.grad_lse)
    grad_logits.addcmul_(weights, common[..., None], value=-1.0)

    _add_relative_gradients(piece, grad_logits, weights, grad_out, totals)
    by_head = _totals_by_head(piece, totals)
    _add_near_gradients(piece, grad_logits, weights, grad_out, by_head)
    _add_far_gradients(piece, out, far_lse, grad_out, by_head)
    if piece.num_groups > 1:
        for total, x in zip((totals.key, totals.value), by_head[1:], strict=True):
            place.in_keys(total).add_(x.unflatten(1, (-1, piece.num_groups)).sum(2))


def _grad_weights(piece: Piece, grad_out: Tensor) -> Tensor:
    """grad_out . (value + rel_v) for each near distance, grad_out . rel_v for each far row."""
    if piece.rel_v is None:
        found = grad_out.new_zeros(*grad_out.shape[:3], piece.num_rows)
    else:
        found = grad_out @ piece.rel_v.mT
    band, value = piece.band, piece.tensors[2]
    if band.width:
        windows = band.windows(value.to(piece.dtype).flatten(0, 1))
        products = torch.bmm(band.blocks(grad_out.flatten(0, 1)), windows.mT)
        band.add_diagonals(products, piece.near(found))
    return found


def _add_relative_gradients(
    piece: Piece, grad_logits: Tensor, weights: Tensor, grad_out: Tensor, totals: _Totals
) -> None:
    """Add the gradients of both tables, and what that of query gets through rel_k."""
    if piece.rel_k is not None:
        piece.place.in_queries(totals.query).add_(grad_logits @ (piece.rel_k * piece.scale))
    if totals.rel_k is not None:
        query = piece.tensors[0].to(piece.dtype) * piece.scale
        _add_rows(piece.place.in_table(totals.rel_k), grad_logits, query)
    if totals.rel_v is not None:
        _add_rows(piece.place.in_table(totals.rel_v), weights, grad_out)


def _add_rows(total: Tensor, by_row: Tensor, x: Tensor) -> None:
    """Add by_row [batch, heads, query, row] times x [batch, heads, query, width] to a table's gradient."""
    if total.dim() == 2:
        total.add_(by_row.flatten(0, 2).mT @ x.flatten(0, 2))
    else:
        total.add_((by_row.mT @ x).sum(0))


def _totals_by_head(piece: Piece, totals: _Totals) -> QKV:
    """Where the gradients of query, key and value of each head are summed, [batch, heads, length, width]."""
    place = piece.place
    query, key, value = place.in_queries(totals.query), place.in_keys(totals.key), place.in_keys(totals.value)
    if piece.num_groups == 1:
        return query, key, value
    zeros = [torch.zeros_like(x).repeat_interleave(piece.num_groups, 1) for x in (key, value)]
    return query, zeros[0], zeros[1]


def _add_near_gradients(
    piece: Piece, grad_logits: Tensor, weights: Tensor, grad_out: Tensor, totals: QKV
) -> None:
    band = piece.band
    if band.width == 0:
        return
    query, key = (x.to(piece.dtype).flatten(0, 1) for x in piece.tensors[:2])
    near = piece.near(grad_logits)
    spread = band.spread(near).mul_(piece.scale)
    products = torch.bmm(spread, band.windows(key))
    totals[0].add_(band.rows(products, near.shape[0]).unflatten(0, totals[0].shape[:2]))
    band.add_windows(torch.bmm(spread.mT, band.blocks(query)), totals[1])
    spread = band.spread(piece.near(weights))
    band.add_windows(torch.bmm(spread.mT, band.blocks(grad_out.flatten(0, 1))), totals[2])


def _add_far_gradients(
    piece: Piece, out: Tensor, far_lse: dict[int, Tensor], grad_out: Tensor, totals: QKV
) -> None:
    """The same for each far region, whose lse and out lack what its row of the tables adds."""
    dtype = piece.tensors[0].dtype
    grad_out = grad_out.to(dtype)
    for row, parts in piece.regions.items():
        rel_v = piece.rel_v
        part_out = (out if rel_v is None else out - rel_v.select(-2, row).unsqueeze(-2)).to(dtype)
        for part in parts:
            far.add_gradients(part, grad_out, piece.tensors, part_out, far_lse[row], piece.scale, totals)
