"""The far and the near parts of relative attention as one softmax.

It has one logit for each row of the tables: of a near distance the logit itself, of a far region the
log-sum-exp of all its keys. In shapes, near = distances between the far regions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from relpos.backends.merged import far
from relpos.backends.merged.partition import Piece, pieces
from relpos.backends.merged.problem import Problem

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def empty_results(problem: Problem, needs_lse: bool, needs_grad: bool) -> Results:
    """Memory for what `attend` returns."""
    by_query = problem.query.shape[:3]
    out = problem.query.new_empty(*by_query, problem.value.shape[3])
    lse = out.new_empty(by_query if needs_lse else 0, dtype=problem.dtype)
    regions = problem.num_regions
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
    wanted = (needs_lse, needs_grad, needs_grad)
    for piece in pieces(problem):
        out = piece.place.in_queries(results[0])
        others = [piece.place.in_queries(x) if w else None for x, w in zip(results[1:], wanted, strict=True)]
        if piece.place.num_keys > 0:
            _attend(piece, out, *others)
            continue
        for x, nothing in zip((out, *others), (0.0, float("-inf"), 0.0, 0.0), strict=True):
            if x is not None:
                x.fill_(nothing)
    return results


def _attend(
    piece: Piece, out: Tensor, lse: Tensor | None, far_weights: Tensor | None, far_out: Tensor | None
) -> None:
    """Write the results of a piece; far_weights and far_out are both there or neither."""
    value = piece.tensors[2]
    regions = [_region(piece, row) for row in piece.regions]
    logits = relative_logits(piece)  # [batch, heads, query, row]
    for region in regions:
        logits[..., region.row].add_(region.lse)
    add_near_logits(piece, logits)
    if lse is None:
        weights = torch.softmax(logits, -1)
    else:
        lse.copy_(torch.logsumexp(logits, -1))
        weights = logits.sub_(lse[..., None]).exp_()

    if piece.rel_v is None:
        total = value.new_zeros(*logits.shape[:3], value.shape[3], dtype=piece.dtype)
    else:
        total = weights @ piece.rel_v  # [batch, heads, query, width]
    for i, region in enumerate(regions):
        weight = weights[..., region.row]
        if far_weights is None or far_out is None:
            region.add_to(total, weight)
            continue
        region_out = torch.zeros_like(total)
        region.add_to(region_out, weight)
        total.add_(region_out)
        far_weights[..., i] = weight
        far_out[..., i, :] = region_out[..., : out.shape[3]]
    _add_near_out(piece, weights, total)
    out.copy_(total[..., : out.shape[3]])


class _Region(NamedTuple):
    """A far region: its row of the tables, its log-sum-exp for each query, and the output of each part."""

    row: int
    lse: Tensor
    parts: list[tuple[far.Part, Tensor, Tensor]]

    def add_to(self, out: Tensor, weights: Tensor) -> None:
        """Add weights [batch, heads, query] times the output of the region."""
        for part, part_out, part_lse in self.parts:
            weight = weights[:, :, part.queries]
            if len(self.parts) > 1:
                weight = weight * (part_lse - self.lse[:, :, part.queries]).exp()
            out[:, :, part.queries].addcmul_(part_out.to(out.dtype), weight[..., None])


def _region(piece: Piece, row: int) -> _Region:
    query = piece.tensors[0]
    found = [(part, *far.attend(part, piece.tensors, piece.scale)) for part in piece.regions[row]]
    if len(found) == 1 and found[0][0].queries == slice(0, query.shape[2]):
        return _Region(row, found[0][2], found)
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=piece.dtype)
    for part, _, part_lse in found:
        lse[:, :, part.queries] = torch.logaddexp(lse[:, :, part.queries], part_lse)
    return _Region(row, lse, found)


def relative_logits(piece: Piece) -> Tensor:
    """scale * query . rel_k, [batch, heads, query, row]."""
    query = piece.tensors[0]
    if piece.rel_k is None:
        return query.new_zeros(*query.shape[:3], piece.num_rows, dtype=piece.dtype)
    return query.to(piece.dtype) @ (piece.rel_k * piece.scale).mT


def add_near_logits(piece: Piece, logits: Tensor) -> None:
    """Add scale * query . key for each near distance to [batch, heads, query, row]; -inf where no key is."""
    band = piece.band
    if band.width == 0:
        return
    query, key = (x.to(piece.dtype).flatten(0, 1) for x in piece.tensors[:2])
    near = piece.near(logits)
    products = torch.bmm(band.blocks(query), band.windows(key).mT)
    band.add_diagonals(products, near, piece.scale)
    band.mask(near, float("-inf"))


def _add_near_out(piece: Piece, weights: Tensor, out: Tensor) -> None:
    band, value = piece.band, piece.tensors[2]
    if band.width == 0:
        return
    near = piece.near(weights)
    by_block = torch.bmm(band.spread(near), band.windows(value.to(piece.dtype).flatten(0, 1)))
    out.view(-1, *out.shape[2:]).add_(band.rows(by_block, near.shape[0]))
