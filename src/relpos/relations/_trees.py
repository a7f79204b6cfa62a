"""Labels for pairs of a tree: kinship, or the path from one token to the other."""

import torch
from torch import Tensor

from relpos.relations._checks import (
    INDEX_DTYPES,
    LABEL_DTYPES,
    both_sides,
    check_integers,
    check_range,
)
from relpos.relations._labels import NO_RELATION, Relations, named, product

TREE_NAMES = ("self", "parent", "child", "sibling", "ancestor", "descendant", "other")


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
    return named(labels.masked_fill_(~exists, NO_RELATION), TREE_NAMES, dtype)


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
    max_up, max_down = both_sides("max_steps", max_steps, "(max_up, max_down)", unit)
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
    return named(labels, product(_step_names("up", max_up), _step_names("down", max_down)), dtype)


def _step_names(direction: str, most: int) -> tuple[str, ...]:
    return (*(f"{direction} {k}" for k in range(most)), f"{direction} {most} or more")


def _ancestry(parents: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Parents with `tokens` for none, whether key is an ancestor of query, and whether a pair exists."""
    check_integers("parents", parents, LABEL_DTYPES)
    if parents.dim() not in (1, 2):
        raise ValueError(
            f"parents must be [tokens] or [batch, tokens]; got {list(parents.shape)}. "
            "Give one index for each token."
        )
    num_tokens = parents.shape[-1]
    tokens = torch.arange(num_tokens, device=parents.device)
    ends = torch.full(parents.shape[:-1], num_tokens, device=parents.device)
    if lengths is not None:
        check_integers("lengths", lengths, INDEX_DTYPES)
        if parents.dim() != 2 or lengths.shape != ends.shape:
            raise ValueError(
                f"lengths must be [batch] for parents [batch, tokens] = {list(parents.shape)}; "
                f"got {list(lengths.shape)}. Give one number for each tree."
            )
        check_range("lengths", lengths, 0, num_tokens + 1, "It counts the tokens of each tree.")
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
