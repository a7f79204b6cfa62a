"""Relative position: key minus query, clipped, as the row of a table (paper, section 3.2).

Holds no tables and no parameters; whoever has a table asks here for the row of each pair.
"""

import torch
from torch import Tensor

# torch.SymInt stands for a length while torch.export traces; isinstance(length, int) is False for it.
INT_TYPES = (int, torch.SymInt)
# positions and distances are int64, and a sum of two of these still is
FARTHEST = 2**62


def clip_distance(distance: Tensor, left: int, right: int) -> Tensor:
    """The row of a table for each distance: clip(distance, -left, right) + left."""
    return distance.clamp(-left, right) + left


def distances(num_queries: int, num_keys: int, query_start: int | Tensor, device: torch.device) -> Tensor:
    """Key position minus query position, j - (query_start + i).

    Returns:
        int64, [query, key] where query_start is a number, [batch, query, key] where it is a tensor [batch].
    """
    i = torch.arange(num_queries, device=device)
    j = torch.arange(num_keys, device=device)
    if isinstance(query_start, Tensor):
        i = query_start[:, None] + i  # [batch, query]
    else:
        i = i + query_start  # [query]
    return j - i[..., None]


def label_table(
    num_queries: int,
    num_keys: int,
    query_start: int | Tensor,
    left: int,
    right: int,
    device: torch.device,
) -> Tensor:
    """The row r(i,j) of each pair.

        r(i,j) = clip(j - (query_start + i), -left, right) + left

    Returns:
        int64, [query, key] where query_start is a number, [batch, query, key] where it is a tensor [batch].
    """
    return clip_distance(distances(num_queries, num_keys, query_start, device), left, right)


def two_sides(
    max_distance: int | tuple[int, int] | None, name: str = "max_distance"
) -> tuple[int, int] | None:
    """(left, right) of k, or of (left, right), or None.

    Args:
        name: what an error calls max_distance.
    Raises:
        TypeError: max_distance is neither. ValueError: negative.
    """
    if max_distance is None:
        return None
    sides = tuple(max_distance) if isinstance(max_distance, (tuple, list)) else (max_distance, max_distance)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, INT_TYPES) for side in sides):
        raise TypeError(
            f"{name} must be None, an integer k, or two integers (left, right); got {max_distance!r}. "
            "Give one of these."
        )
    left, right = sides
    if left < 0 or right < 0:
        raise ValueError(
            f"{name} must be at least 0; got {max_distance!r}. "
            "It counts tokens: left before the query, right after it."
        )
    return left, right


def resolve_max_distance(
    max_distance: int | tuple[int, int] | None, rel_k_labels: int | None, rel_v_labels: int | None
) -> tuple[int, int]:
    """(left, right) of tables with so many rows, either of which may be absent.

    Args:
        max_distance: k, or (left, right), or None: symmetric, read off the tables.
        rel_k_labels: rows of rel_k, None where there is no table.
        rel_v_labels: rows of rel_v, None where there is no table.
    Raises:
        TypeError: max_distance is neither. ValueError: negative, or not what the tables have.
    """
    sides = two_sides(max_distance)
    for name, labels in (("rel_k", rel_k_labels), ("rel_v", rel_v_labels)):
        if labels is None:
            continue
        if sides is None:
            if labels % 2 == 0:
                raise ValueError(
                    f"{name} must have an odd number of rows, 2 * k + 1, when max_distance is None; "
                    f"got {labels}. Give max_distance=(left, right)."
                )
            sides = (labels // 2, labels // 2)
            if name == "rel_k" and rel_v_labels not in (None, labels):
                raise ValueError(
                    f"rel_v must have as many rows as rel_k = {labels}; got {rel_v_labels}. "
                    "Both tables count the same distances."
                )
        elif labels != sides[0] + sides[1] + 1:
            raise ValueError(
                f"{name} must have left + right + 1 = {sides[0] + sides[1] + 1} rows; got {labels}. "
                "Check max_distance."
            )
    # without a table no row is ever asked for
    return (0, 0) if sides is None else sides
