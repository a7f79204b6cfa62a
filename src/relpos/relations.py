"""Labels for pairs of tokens, from the structure that the tokens stand in (paper, section 3.1).

Distances, grids, trees and graphs become one integer a pair, with a name for each label; tables, a vector for
each label, are the caller's. A label says what the key is to the query, as distance is key minus query.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos.positions import FARTHEST, INT_TYPES, label_table

NO_RELATION = -1
TREE_NAMES = ("self", "parent", "child", "sibling", "ancestor", "descendant", "other")

# uint8 has no -1
_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
_INDEX_DTYPES = (*_LABEL_DTYPES, torch.uint8)


@dataclass(frozen=True, eq=False, repr=False)
class Relations:
    """A label for each pair, and what each label means.

    Args:
        labels: integers [..., query, key], 0 <= label < num_labels, or -1 for "no relation".
        names: what each label means, in the order of the labels; its length is the number of rows that a
            table needs. No two are alike; kept as a tuple.
    Raises:
        ValueError: a label has no name, two have one, or there are fewer than two dimensions.
        TypeError: labels are no integers, or names no sequence of strings.
    """

    labels: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        # a frozen instance takes no other assignment
        object.__setattr__(self, "names", _checked_names(self.names))
        _check_integers("labels", self.labels, _LABEL_DTYPES)
        if self.labels.dim() < 2:
            raise ValueError(
                f"labels must have at least 2 dimensions, [..., query, key]; got {list(self.labels.shape)}. "
                "Give a label for each pair."
            )
        _check_range("labels", self.labels, NO_RELATION, self.num_labels, "Give each label a name.")

    def __repr__(self) -> str:
        """Shape and dtype of the labels, and the first names."""
        labels = f"{list(self.labels.shape)} {str(self.labels.dtype).removeprefix('torch.')}"
        shown = ", ".join(map(repr, self.names[:3])) + (", ..." if self.num_labels > 3 else "")
        return f"Relations(labels={labels}, num_labels={self.num_labels}, names=({shown}))"

    @property
    def num_labels(self) -> int:
        """Rows of a table for these labels."""
        return len(self.names)


def distance_relations(
    num_queries: int,
    num_keys: int | None = None,
    *,
    max_distance: int | tuple[int, int],
    query_start: int = 0,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Relations:
    """Label each pair with its clipped distance, the labelling of `relative_attention`.

        label[i,j] = clip(j - (query_start + i), -left, right) + left

    Args:
        num_queries, num_keys: lengths in tokens; as many keys as queries by default.
        max_distance: k, or (left, right), in tokens.
        query_start: position of the first query among the keys, in tokens.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        Labels [query, key] with left + right + 1 names; label `left` is distance 0.
    Raises:
        ValueError: a number is negative, or query_start beyond 2**62. TypeError: not integers.
    Source: Shaw et al. 2018, section 3.2.
    """
    num_keys = num_queries if num_keys is None else num_keys
    _check_count("num_queries", num_queries)
    _check_count("num_keys", num_keys)
    if isinstance(query_start, bool) or not isinstance(query_start, INT_TYPES):
        raise TypeError(
            f"query_start must be an integer; got {type(query_start).__name__}. "
            "Label each sequence by itself where they start at different positions."
        )
    # while torch traces, numbers may be symbols
    if type(query_start) is int and abs(query_start) > FARTHEST:
        raise ValueError(
            f"query_start must be between -2**62 and 2**62; got {query_start}. "
            "It is the position of the first query among the keys."
        )
    unit = "tokens: left before the query, right after it"
    left, right = _sides("max_distance", max_distance, "(left, right)", unit)
    labels = label_table(num_queries, num_keys, query_start, left, right, _device(device))
    return _named(labels, _distance_names(left, right, ("before", "same position", "after")), dtype)


def grid_relations(
    height: int,
    width: int,
    *,
    max_distance: int | tuple[int, int],
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Relations:
    """Label each pair of cells of a grid with the offset from query to key, clipped along each axis.

        label[i,j] = (clip(down, -k_h, k_h) + k_h) * (2 k_w + 1) + clip(right, -k_w, k_w) + k_w

    Args:
        height, width: rows and columns; the tokens are the cells row by row.
        max_distance: k, or (k_h, k_w), in cells down or up, and right or left.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        Labels [height * width, height * width] with (2 k_h + 1) (2 k_w + 1) names.
    Raises:
        ValueError: a number is negative. TypeError: not integers.
    """
    _check_count("height", height, "rows")
    _check_count("width", width, "columns")
    k_h, k_w = _sides("max_distance", max_distance, "(k_h, k_w)", "cells: k_h down or up, k_w right or left")
    rows = label_table(height, height, 0, k_h, k_h, _device(device))[:, None, :, None]
    columns = label_table(width, width, 0, k_w, k_w, _device(device))[None, :, None, :]
    labels = (rows * (2 * k_w + 1) + columns).reshape(height * width, height * width)
    down = _distance_names(k_h, k_h, ("up", "same row", "down"))
    right = _distance_names(k_w, k_w, ("left", "same column", "right"))
    return _named(labels, _product(down, right), dtype)


def tree_relations(
    parents: Tensor, *, lengths: Tensor | None = None, dtype: torch.dtype = torch.int64
) -> Relations:
    """Label each pair of a tree with what the key is to the query: its parent, child, sibling and so on.

    Args:
        parents: integers [tokens] or [batch, tokens], the index of each token's parent; -1 for a root. Tokens
            may stand in any order, and there may be several roots.
        lengths: integers [batch], tokens of each tree; what parents holds from there on is not read, and
            pairs there have no relation, -1.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        Labels [tokens, tokens] or [batch, tokens, tokens] with the 7 names of TREE_NAMES. A pair has the
        first that fits: an ancestor is above the parent, a descendant below the children. Two roots are
        "other".
    Raises:
        ValueError: a parent is out of range, or parents run in a cycle. TypeError: not integers.
    """
    above, is_ancestor, exists = _ancestry(parents, lengths)
    tokens = torch.arange(above.shape[-1], device=above.device)
    is_parent = above[..., :, None] == tokens
    is_sibling = (above[..., :, None] == above[..., None, :]) & (above < len(tokens))[..., :, None]
    labels = torch.full_like(is_ancestor, TREE_NAMES.index("other"), dtype=dtype)
    # the later name wins, so the wider ones come first
    for name, fits in (
        ("descendant", is_ancestor.mT),
        ("ancestor", is_ancestor),
        ("sibling", is_sibling),
        ("child", is_parent.mT),
        ("parent", is_parent),
        ("self", tokens[:, None] == tokens),
    ):
        labels.masked_fill_(fits, TREE_NAMES.index(name))
    return _named(labels.masked_fill_(~exists, NO_RELATION), TREE_NAMES, dtype)


def tree_path_relations(
    parents: Tensor,
    *,
    max_steps: int | tuple[int, int],
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> Relations:
    """Label each pair of a tree with the way from query to key: so many steps up, then so many down.

        label[i,j] = min(up, max_up) * (max_down + 1) + min(down, max_down)

    Finer than `tree_relations`: up 1, down 0 is the parent, up 1, down 1 a sibling, up 2, down 1 an uncle.

    Args:
        parents, lengths: as for `tree_relations`. Several roots count as children of one that is not seen.
        max_steps: k, or (max_up, max_down), in edges of the tree.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        Labels [tokens, tokens] or [batch, tokens, tokens] with (max_up + 1) (max_down + 1) names.
    Raises:
        ValueError: a parent is out of range, or parents run in a cycle. TypeError: not integers.
    """
    unit = "edges of the tree: max_up towards the root, max_down away from it"
    max_up, max_down = _sides("max_steps", max_steps, "(max_up, max_down)", unit)
    _, is_ancestor, exists = _ancestry(parents, lengths)
    itself = torch.eye(is_ancestor.shape[-1], dtype=torch.bool, device=is_ancestor.device)
    # float32 counts exactly up to 2 ** 24 tokens, and autocast would count in less
    line = (is_ancestor | itself).float()  # [..., tokens, tokens], 1 for a token's line up to its root
    with torch.autocast(line.device.type, enabled=False):
        shared = (line @ line.mT).long()
    depth = line.sum(-1).long()
    up = (depth[..., :, None] - shared).clamp(max=max_up)
    down = (depth[..., None, :] - shared).clamp(max=max_down)
    labels = (up * (max_down + 1) + down).masked_fill(~exists, NO_RELATION)
    return _named(labels, _product(_step_names("up", max_up), _step_names("down", max_down)), dtype)


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
    names = _checked_names(names)
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
    return _named(labels.view(num_nodes, num_nodes), names, dtype)


def combine_relations(first: Relations, second: Relations, *, dtype: torch.dtype = torch.int64) -> Relations:
    """Label each pair with both of its labels: the product of two labellings.

        label = first * second.num_labels + second

    Args:
        first, second: their labels broadcast to one shape.
        dtype: of the labels, int64, int32, int16 or int8.
    Returns:
        first.num_labels * second.num_labels names. A pair that has no relation, -1, in one has none in the
        product; give it a label first where the other should count.
    Raises:
        ValueError: shapes do not broadcast, or dtype is too small. TypeError: one is no Relations.
    """
    _check_relations("first", first)
    _check_relations("second", second)
    a, b = first.labels.long(), second.labels.long()
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError as error:
        raise ValueError(
            f"second must have labels that broadcast with those of first = {list(a.shape)}; "
            f"got {list(b.shape)}. Label the same tokens."
        ) from error
    labels = (a * second.num_labels + b).masked_fill((a < 0) | (b < 0), NO_RELATION)
    return _named(labels, _product(first.names, second.names), dtype)


def stack_relations(parts: Sequence[Relations]) -> Relations:
    """Put the labels of several graphs into one batch, padded with "no relation".

    Args:
        parts: each with labels [query, key] and the same names.
    Returns:
        Labels [batch, longest query, longest key] in the widest dtype of the parts; -1 beyond a graph's own.
        Hide those keys from attention with key_lengths.
    Raises:
        ValueError: there are none, they have different names, or one is a batch already.
        TypeError: parts is no sequence, or one of them no Relations.
    """
    if not isinstance(parts, Sequence):
        raise TypeError(f"parts must be a list of Relations; got {type(parts).__name__}. Make it a list.")
    if not parts:
        raise ValueError("parts must hold at least 1 graph; got 0. Leave out empty batches.")
    for index, part in enumerate(parts):
        _check_relations(f"parts[{index}]", part)
        if part.names != parts[0].names:
            raise ValueError(
                f"parts must have the same names = {len(parts[0].names)} labels of the first; "
                f"got {len(part.names)}, or others. Label them alike."
            )
        if part.labels.dim() != 2:
            raise ValueError(
                f"parts must have labels [query, key]; got {list(part.labels.shape)}. Concatenate batches."
            )
    queries, keys = (max(part.labels.shape[axis] for part in parts) for axis in (0, 1))
    widest = max((part.labels.dtype for part in parts), key=lambda dtype: torch.iinfo(dtype).max)
    labels = parts[0].labels.new_full((len(parts), queries, keys), NO_RELATION, dtype=widest)
    for row, part in zip(labels, parts, strict=True):
        row[: part.labels.shape[0], : part.labels.shape[1]] = part.labels
    return Relations(labels, parts[0].names)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _named(labels: Tensor, names: tuple[str, ...], dtype: torch.dtype) -> Relations:
    if dtype not in _LABEL_DTYPES:
        raise TypeError(f"dtype must be int64, int32, int16 or int8; got {dtype}. Labels are integers or -1.")
    largest = torch.iinfo(dtype).max
    if len(names) - 1 > largest:
        raise ValueError(
            f"dtype must hold the largest label = {len(names) - 1}; got {dtype}, which ends at {largest}. "
            "Take a wider one, or clip more."
        )
    return Relations(labels.to(dtype), names)


def _distance_names(left: int, right: int, words: tuple[str, str, str]) -> tuple[str, ...]:
    before, same, after = words
    if left == right == 0:
        return ("any",)
    names = [f"{k} {before}" for k in range(left, 0, -1)]
    names += [same, *(f"{k} {after}" for k in range(1, right + 1))]
    # the ends take in what is clipped
    names[0] = f"{left} or more {before}" if left else f"{same} or {before}"
    names[-1] = f"{right} or more {after}" if right else f"{same} or {after}"
    return tuple(names)


def _step_names(direction: str, most: int) -> tuple[str, ...]:
    return (*(f"{direction} {k}" for k in range(most)), f"{direction} {most} or more")


def _product(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{a}, {b}" for a in first for b in second)


def _ancestry(parents: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Parents with `tokens` for none, whether key is an ancestor of query, and whether a pair exists."""
    _check_integers("parents", parents, _LABEL_DTYPES)
    if parents.dim() not in (1, 2):
        raise ValueError(
            f"parents must be [tokens] or [batch, tokens]; got {list(parents.shape)}. "
            "Give one index for each token."
        )
    num_tokens = parents.shape[-1]
    tokens = torch.arange(num_tokens, device=parents.device)
    ends = torch.full(parents.shape[:-1], num_tokens, device=parents.device)
    if lengths is not None:
        _check_integers("lengths", lengths, _INDEX_DTYPES)
        if parents.dim() != 2 or lengths.shape != ends.shape:
            raise ValueError(
                f"lengths must be [batch] for parents [batch, tokens] = {list(parents.shape)}; "
                f"got {list(lengths.shape)}. Give one number for each tree."
            )
        _check_range("lengths", lengths, 0, num_tokens + 1, "It counts the tokens of each tree.")
        ends = lengths.to(ends)
    is_token = tokens < ends[..., None]
    above = torch.where(is_token, parents.long(), NO_RELATION)
    is_outside = (above < NO_RELATION) | (above >= ends[..., None]) & is_token
    if is_outside.any():
        raise ValueError(
            f"parents must be between -1 and the last token of the tree; got {above[is_outside][0].item()}. "
            "-1 is a root."
        )
    above = above.masked_fill(above < 0, num_tokens)
    return above, _ancestors(above), is_token[..., :, None] & is_token[..., None, :]


def _ancestors(above: Tensor) -> Tensor:
    """Bool [..., tokens, tokens], True where key is an ancestor of query; one step up all lines at a time."""
    num_tokens = above.shape[-1]
    # a last column stands above the roots, and is its own parent
    is_ancestor = above.new_zeros((*above.shape, num_tokens + 1), dtype=torch.bool)
    onwards = torch.cat([above, torch.full_like(above[..., :1], num_tokens)], -1) if num_tokens else above
    at = above
    for _ in range(num_tokens):
        if (at == num_tokens).all():
            break
        is_ancestor.scatter_(-1, at[..., None], True)
        at = onwards.gather(-1, at)
    is_caught = at != num_tokens
    if is_caught.any():
        raise ValueError(
            "parents must lead each token to a root (-1); "
            f"got a cycle through token {at[is_caught][0].item()}. Break it."
        )
    return is_ancestor[..., :num_tokens]


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
    _check_count("num_nodes", num_nodes, "nodes")
    _check_integers("edge_index", edge_index, _INDEX_DTYPES)
    _check_integers("edge_types", edge_types, _INDEX_DTYPES)
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
    _check_range("edge_index", edge_index, 0, num_nodes, "Check num_nodes.")
    _check_range("edge_types", edge_types, 0, len(names), "Give each type a name.")


def _check_range(name: str, x: Tensor, first: int, end: int, advice: str) -> None:
    for value in x.aminmax() if x.numel() else ():
        if not first <= value.item() < end:
            raise ValueError(
                f"{name} must be at least {first} and less than {end}; got {value.item()}. {advice}"
            )


def _check_integers(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of integers; got {type(x).__name__}. Make it a tensor.")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} must be a tensor of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}; "
            f"got {x.dtype}. Convert it with .long()."
        )


def _check_relations(name: str, relations: Relations) -> None:
    if not isinstance(relations, Relations):
        raise TypeError(
            f"{name} must be Relations; got {type(relations).__name__}. "
            "Make them with a function of relpos.relations, or of labels and names."
        )


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    # a str is a sequence of strings too, and no list of names
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"names must be a tuple or list of strings; got {type(names).__name__}. Name each label."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"names must be strings; got {type(name).__name__}. Say in words what each label means."
            )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"names must be different; got {twice[0]!r} for two labels. Rename one.")
    return tuple(names)


def _check_count(name: str, count: int, unit: str = "tokens") -> None:
    if isinstance(count, bool) or not isinstance(count, INT_TYPES):
        raise TypeError(f"{name} must be an integer; got {type(count).__name__}. It counts {unit}.")
    if count < 0:
        raise ValueError(f"{name} must be at least 0; got {count}. It counts {unit}.")


def _sides(name: str, sides: int | tuple[int, int], pair: str, unit: str) -> tuple[int, int]:
    """Both of `sides`, which an error calls `name`, with `pair` for two and `unit` for what they count."""
    found = tuple(sides) if isinstance(sides, (tuple, list)) else (sides, sides)
    if len(found) != 2 or any(isinstance(side, bool) or not isinstance(side, INT_TYPES) for side in found):
        raise TypeError(
            f"{name} must be an integer k, or two integers {pair}; got {sides!r}. It says where to clip."
        )
    if found[0] < 0 or found[1] < 0:
        raise ValueError(f"{name} must be at least 0; got {sides!r}. It counts {unit}.")
    return found[0], found[1]
