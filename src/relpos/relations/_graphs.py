"""Labels for pairs of a graph: the type of the edge between them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from relpos.relations._checks import (
    INDEX_DTYPES,
    check_count,
    check_integers,
    check_range,
    checked_names,
)
from relpos.relations._labels import NO_RELATION, Relations, named


def edge_relations(
    edge_index: Tensor,
    edge_types: Tensor,
    *,
    num_nodes: int,
    names: Sequence[str],
    inverse: bool = False,
    elsewhere: str | None = None,
    dtype: torch.dtype = torch.int64,
) -> Relations:
    """Label each pair of a graph with the type of the edge from query to key.

    Args:
        edge_index: integers [2, edges]; row 0 is where an edge starts, the query, row 1 where it ends, the
            key.
        edge_types: integers [edges], 0 <= type < len(names).
        num_nodes: tokens of the graph.
        names: what each type means.
        inverse: whether the pair from end to start gets a label as well, len(names) + type, where no edge of
            its own runs.
        elsewhere: name of a last label, for pairs without an edge. Default: they have no relation, -1.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        Labels [num_nodes, num_nodes].
    Raises:
        ValueError: shapes or ranges disagree, two labels have one name, or a pair has edges of two types.
        TypeError: not integers, or names no sequence of strings.
    """
    names = checked_names(names)
    _check_edges(edge_index, edge_types, num_nodes, names)
    start, end, types = (x.long() for x in (*edge_index, edge_types))
    pairs = start * num_nodes + end
    direct = _by_pair(pairs, types, num_nodes)
    labels = direct
    if inverse:
        back = direct.view(num_nodes, num_nodes).mT.reshape(-1)
        is_back = (direct < 0) & (back >= 0)
        labels = torch.where(is_back, back + len(names), direct)
        names += tuple(f"inverse of {name}" for name in names)
    if elsewhere is not None:
        labels = labels.masked_fill(labels < 0, len(names))
        names += (elsewhere,)
    return named(labels.view(num_nodes, num_nodes), names, dtype)


def _by_pair(pairs: Tensor, types: Tensor, num_nodes: int) -> Tensor:
    """The type of each pair [num_nodes * num_nodes], -1 where there is no edge."""
    labels = types.new_full((num_nodes * num_nodes,), NO_RELATION)
    labels[pairs] = types
    is_conflict = labels[pairs] != types
    if is_conflict.any():
        pair = int(pairs[is_conflict][0])
        given = types[pairs == pair].unique().tolist()
        raise ValueError(
            "edge_types must be one type for a pair; "
            f"got {given} from {pair // num_nodes} to {pair % num_nodes}. Keep one, or make a type of both."
        )
    return labels


def _check_edges(edge_index: Tensor, edge_types: Tensor, num_nodes: int, names: tuple[str, ...]) -> None:
    check_count("num_nodes", num_nodes, "nodes")
    check_integers("edge_index", edge_index, INDEX_DTYPES)
    check_integers("edge_types", edge_types, INDEX_DTYPES)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        is_turned = edge_index.dim() == 2 and edge_index.shape[1] == 2
        raise ValueError(
            f"edge_index must be [2, edges]; got {list(edge_index.shape)}. "
            f"Row 0 is the start, row 1 the end.{' Transpose it.' if is_turned else ''}"
        )
    if edge_types.shape != edge_index.shape[1:]:
        raise ValueError(
            f"edge_types must be [edges] = {list(edge_index.shape[1:])}; got {list(edge_types.shape)}. "
            "Give one type for each edge."
        )
    if edge_types.device != edge_index.device:
        raise ValueError(
            f"edge_types must be on the device of edge_index = {edge_index.device}; got {edge_types.device}. "
            "Move it with .to()."
        )
    check_range("edge_index", edge_index, 0, num_nodes, "Check num_nodes.")
    check_range("edge_types", edge_types, 0, len(names), "Give each type a name.")
