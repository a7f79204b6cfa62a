"""The far and the near parts of relative attention as one softmax, and the gradients of that.

The softmax has one logit for each row of the tables: of a near distance the logit itself, of a far region the
log-sum-exp of all its keys. In shapes, near = distances between the far regions.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.backends.merged import far
from relpos.backends.merged.far import QKV, Part
from relpos.backends.merged.partition import Piece, Problem

Results = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def empty_results(problem: Problem, needs_lse: bool, needs_grad: bool) -> Results:
    """Memory for what `attend` returns."""
    by_query = problem.query.shape[:3]
    out = problem.query.new_empty(*by_query, problem.value.shape[3])
    lse = out.new_empty(by_query if needs_lse else 0, dtype=problem.dtype)
    regions = 1 + problem.has_right
    far_weights = lse.new_empty((*by_query, regions) if needs_grad else 0)
    far_out = out.new_empty((*by_query, regions, out.shape[3]) if needs_grad else 0)
    return out, lse, far_weights, far_out


def attend(problem: Problem, needs_lse: bool, needs_grad: bool) -> Results:
    """Attention, and what is asked for besides; what is not is an empty tensor.

    Returns:
        out: [batch, heads, query, d_v], dtype of query.
        lse: [batch, heads, query], -inf for a query with no key; the backward pass needs it.
        far_weights: [batch, heads, query, region], all the weight in the left and in the right far region.
        far_out: [batch, heads, query, region, d_v], what the values of each region add to out.
    """
    results = empty_results(problem, needs_lse, needs_grad)
    out, lse, far_weights, far_out = results
    problem, _ = problem.on_host().within_reach()
    for piece in problem.pieces():
        if piece.num_keys == 0:
            for x, nothing in zip(results, (0.0, float("-inf"), 0.0, 0.0), strict=True):
                if x.numel():
                    x[piece.where] = nothing
            continue
        found = _attend(problem, piece, needs_lse, needs_grad)
        out[piece.where] = found.out[..., : out.shape[3]]
        if found.lse is not None:
            lse[piece.where] = found.lse
        if needs_grad:
            for i, (row, region_out) in enumerate(zip(piece.far_rows, found.far_out, strict=True)):
                far_weights[piece.where][..., i] = found.weights[..., row]
                far_out[piece.where][..., i, :] = region_out[..., : out.shape[3]]
    return results


class _Found(NamedTuple):
    out: Tensor
    lse: Tensor | None
    weights: Tensor
    far_out: list[Tensor]


class _Region(NamedTuple):
    """A far region: its row of the tables, its log-sum-exp for each query, and the output of each part."""

    row: int
    lse: Tensor
    parts: list[tuple[Part, Tensor, Tensor]]

    def add_to(self, out: Tensor, weights: Tensor) -> None:
        """Add weights [batch, heads, query] times the output of the region."""
        for part, part_out, part_lse in self.parts:
            weight = weights[:, :, part.queries]
            if len(self.parts) > 1:
                weight = weight * (part_lse - self.lse[:, :, part.queries]).exp()
            out[:, :, part.queries].addcmul_(part_out.to(out.dtype), weight[..., None])


def _attend(problem: Problem, piece: Piece, needs_lse: bool, keeps_far: bool) -> _Found:
    tensors = problem.qkv(piece)
    regions = [_region(problem, tensors, row, parts) for row, parts in piece.far_parts]
    logits = _relative_logits(problem, piece, tensors[0])  # [batch, heads, query, row]
    for region in regions:
        logits[..., region.row].add_(region.lse)
    _add_near_logits(problem, piece, tensors, logits)
    lse = torch.logsumexp(logits, -1) if needs_lse else None
    weights = torch.softmax(logits, -1) if lse is None else logits.sub_(lse[..., None]).exp_()

    rel_v = problem.rows(problem.rel_v, piece)
    out = tensors[2].new_zeros(tensors[0].shape, dtype=problem.dtype) if rel_v is None else weights @ rel_v
    far_out = []
    for region in regions:
        region_out = torch.zeros_like(out) if keeps_far else out
        region.add_to(region_out, weights[..., region.row])
        if keeps_far:
            out.add_(region_out)
            far_out.append(region_out)
    _add_near_out(problem, piece, tensors[2], weights, out)
    return _Found(out, lse, weights, far_out)


def _region(problem: Problem, tensors: QKV, row: int, parts: list[Part]) -> _Region:
    found = [(part, *far.attend(part, tensors, problem.scale)) for part in parts]
    if len(found) == 1 and found[0][0].queries == slice(0, tensors[0].shape[2]):
        return _Region(row, found[0][2], found)
    lse = tensors[0].new_full(tensors[0].shape[:3], float("-inf"), dtype=problem.dtype)
    for part, _, part_lse in found:
        lse[:, :, part.queries] = torch.logaddexp(lse[:, :, part.queries], part_lse)
    return _Region(row, lse, found)


def _relative_logits(problem: Problem, piece: Piece, query: Tensor) -> Tensor:
    """scale * query . rel_k, [batch, heads, query, row]."""
    rel_k = problem.rows(problem.rel_k, piece)
    if rel_k is None:
        return query.new_zeros(*query.shape[:3], piece.num_rows, dtype=problem.dtype)
    return query.to(problem.dtype) @ (rel_k * problem.scale).mT


def _near(piece: Piece, x: Tensor) -> Tensor:
    """The near distances of x [batch, heads, query, row], as a view [group, query, near]."""
    return x.view(-1, *x.shape[2:])[..., 1 : 1 + piece.band.width]


def _add_near_logits(problem: Problem, piece: Piece, tensors: QKV, logits: Tensor) -> None:
    band = piece.band
    if band.width == 0:
        return
    query, key = (x.to(problem.dtype).flatten(0, 1) for x in tensors[:2])
    near = _near(piece, logits)
    products = torch.bmm(band.blocks(query), band.windows(key).mT)
    band.add_diagonals(products, near, problem.scale)
    band.mask(near, float("-inf"))


def _add_near_out(problem: Problem, piece: Piece, value: Tensor, weights: Tensor, out: Tensor) -> None:
    band = piece.band
    if band.width == 0:
        return
    near = _near(piece, weights)
    by_block = torch.bmm(band.spread(near), band.windows(value.to(problem.dtype).flatten(0, 1)))
    out.view(-1, *out.shape[2:]).add_(band.rows(by_block, near.shape[0]))


def gradients(problem: Problem, results: Results, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of query, key, value, rel_k and rel_v; an empty tensor where there is no table."""
    given = (problem.query, problem.key, problem.value, problem.rel_k, problem.rel_v)
    if grad_lse is not None:
        problem, results, grad_out = _with_lse_in_out(problem, results, grad_out, grad_lse)
    totals = [
        problem.query.new_zeros((*x.shape[:-1], problem.width) if x is not None else 0, dtype=problem.dtype)
        for x in given
    ]
    problem, first = problem.on_host().within_reach()
    reached = [x[..., first:, :] if i >= 3 and x.numel() else x for i, x in enumerate(totals)]
    for piece in problem.pieces():
        if piece.num_keys > 0:
            _add_gradients(problem, piece, results, grad_out, grad_lse, reached)
    query, key, value, rel_k, rel_v = (
        total if x is None else total[..., : x.shape[-1]].to(x.dtype).contiguous()
        for x, total in zip(given, totals, strict=True)
    )
    return query, key, value, rel_k, rel_v


def _with_lse_in_out(
    problem: Problem, results: Results, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Problem, Results, Tensor]:
    """The gradient of lse as that of one more column of out, of which each value holds 0 and out holds -1.

    The gradient of a logit is weight * (grad_out . value - grad_out . out), so that column adds weight times
    the gradient of lse, which is what lse asks for.
    """
    # a gradient of lse may be larger than half precision holds
    problem = problem._replace(
        query=problem.query.to(problem.dtype),
        key=problem.key.to(problem.dtype),
        value=problem.value.to(problem.dtype),
    )
    out, lse, far_weights, far_out = (x.to(problem.dtype) for x in results)
    rel_v = None if problem.rel_v is None else F.pad(problem.rel_v, (0, 1))
    problem = problem._replace(value=F.pad(problem.value, (0, 1)), rel_v=rel_v)
    grad_out = torch.cat((grad_out.to(problem.dtype), grad_lse[..., None]), -1)
    return problem, (F.pad(out, (0, 1), value=-1.0), lse, far_weights, F.pad(far_out, (0, 1))), grad_out


def _add_gradients(
    problem: Problem,
    piece: Piece,
    results: Results,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    totals: list[Tensor],
) -> None:
    tensors = problem.qkv(piece)
    out, grad_out = (problem.widened(x[piece.where]).to(problem.dtype) for x in (results[0], grad_out))
    lse = results[1][piece.where]
    relative = _relative_logits(problem, piece, tensors[0])
    far_logits = relative[..., 0].clone(), relative[..., -1].clone()
    _add_near_logits(problem, piece, tensors, relative)
    weights = relative.sub_(lse[..., None]).exp_()
    far_weights, far_out = results[2][piece.where], results[3][piece.where]
    for i, row in enumerate(piece.far_rows):
        weights[..., row] = far_weights[..., i]
    grad_logits = _grad_weights(problem, piece, tensors[2], grad_out).mul_(weights)
    for i, row in enumerate(piece.far_rows):
        grad_logits[..., row].add_((grad_out * problem.widened(far_out[..., i, :])).sum(-1))
    # grad_out . out, from the parts and not from out, whose rounding would not cancel in half precision
    common = grad_logits.sum(-1) if grad_lse is None else grad_logits.sum(-1) - grad_lse[piece.where]
    grad_logits.addcmul_(weights, common[..., None], value=-1.0)

    _add_relative_gradients(problem, piece, tensors[0], grad_logits, weights, grad_out, totals)
    qkv_totals = _totals_by_head(problem, piece, totals)
    _add_near_gradients(problem, piece, tensors, grad_logits, weights, grad_out, qkv_totals)
    rel_v = problem.rows(problem.rel_v, piece)
    for row, parts in piece.far_parts:
        part_out = out if rel_v is None else out - rel_v.select(-2, row).unsqueeze(-2)
        for part in parts:
            far.add_gradients(
                part,
                grad_out.to(problem.far_dtype),
                tensors,
                part_out.to(problem.far_dtype),
                lse - far_logits[row],
                problem.scale,
                qkv_totals,
            )
    if problem.num_groups > 1:
        for total, by_head in zip(totals[1:3], qkv_totals[1:], strict=True):
            total[piece.keys_where].add_(by_head.unflatten(1, (-1, problem.num_groups)).sum(2))


def _grad_weights(problem: Problem, piece: Piece, value: Tensor, grad_out: Tensor) -> Tensor:
    """grad_out . (value + rel_v) for each near distance, grad_out . rel_v for each far row."""
    rel_v = problem.rows(problem.rel_v, piece)
    if rel_v is None:
        found = grad_out.new_zeros(*grad_out.shape[:3], piece.num_rows)
    else:
        found = grad_out @ rel_v.mT
    band = piece.band
    if band.width:
        windows = band.windows(value.to(problem.dtype).flatten(0, 1))
        products = torch.bmm(band.blocks(grad_out.flatten(0, 1)), windows.mT)
        band.add_diagonals(products, _near(piece, found))
    return found


def _add_relative_gradients(
    problem: Problem,
    piece: Piece,
    query: Tensor,
    grad_logits: Tensor,
    weights: Tensor,
    grad_out: Tensor,
    totals: list[Tensor],
) -> None:
    """Add the gradients of both tables, and what that of query gets through rel_k."""
    rel_k = problem.rows(problem.rel_k, piece)
    if rel_k is not None:
        totals[0][piece.where] += grad_logits @ (rel_k * problem.scale)
        scaled = query.to(problem.dtype) * problem.scale
        _add_rows(piece, grad_logits, scaled, totals[3])
    if problem.rel_v is not None:
        _add_rows(piece, weights, grad_out, totals[4])


def _add_rows(piece: Piece, by_row: Tensor, x: Tensor, total: Tensor) -> None:
    """Add by_row [batch, heads, query, row] times x [batch, heads, query, width] to a table's gradient."""
    if total.dim() == 2:
        total[: piece.num_rows].add_(by_row.flatten(0, 2).mT @ x.flatten(0, 2))
    else:
        total[piece.heads, : piece.num_rows].add_((by_row.mT @ x).sum(0))


def _totals_by_head(problem: Problem, piece: Piece, totals: list[Tensor]) -> QKV:
    """Where the gradients of query, key and value of each head are summed, [batch, heads, length, width]."""
    query, key, value = totals[0][piece.where], totals[1][piece.keys_where], totals[2][piece.keys_where]
    if problem.num_groups == 1:
        return query, key, value
    zeros = [torch.zeros_like(x).repeat_interleave(problem.num_groups, 1) for x in (key, value)]
    return query, zeros[0], zeros[1]


def _add_near_gradients(
    problem: Problem,
    piece: Piece,
    tensors: QKV,
    grad_logits: Tensor,
    weights: Tensor,
    grad_out: Tensor,
    totals: QKV,
) -> None:
    band = piece.band
    if band.width == 0:
        return
    near = _near(piece, grad_logits)
    spread = band.spread(near).mul_(problem.scale)
    windows = band.windows(tensors[1].to(problem.dtype).flatten(0, 1))
    totals[0].add_(band.rows(torch.bmm(spread, windows), near.shape[0]).unflatten(0, totals[0].shape[:2]))
    query = band.blocks(tensors[0].to(problem.dtype).flatten(0, 1))
    band.add_windows(torch.bmm(spread.mT, query), totals[1])
    spread = band.spread(_near(piece, weights))
    band.add_windows(torch.bmm(spread.mT, band.blocks(grad_out.flatten(0, 1))), totals[2])
