"""Labels for the distances along a sequence, and along both axes of a grid."""

import torch

from relpos._positions import FARTHEST, INT_TYPES, label_table
from relpos.relations._checks import both_sides, check_count
from relpos.relations._labels import Relations, named, product


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
    check_count("num_queries", num_queries)
    check_count("num_keys", num_keys)
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
    left, right = both_sides("max_distance", max_distance, "(left, right)", unit)
    labels = label_table(num_queries, num_keys, query_start, left, right, _device(device))
    return named(labels, _distance_names(left, right, ("before", "same position", "after")), dtype)


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
    check_count("height", height, "rows")
    check_count("width", width, "columns")
    k_h, k_w = both_sides(
        "max_distance", max_distance, "(k_h, k_w)", "cells: k_h down or up, k_w right or left"
    )
    rows = label_table(height, height, 0, k_h, k_h, _device(device))[:, None, :, None]
    columns = label_table(width, width, 0, k_w, k_w, _device(device))[None, :, None, :]
    labels = (rows * (2 * k_w + 1) + columns).reshape(height * width, height * width)
    down = _distance_names(k_h, k_h, ("up", "same row", "down"))
    right = _distance_names(k_w, k_w, ("left", "same column", "right"))
    return named(labels, product(down, right), dtype)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


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
