"""Labels for pairs, each label with a name, and how two labellings are combined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos.relations._checks import LABEL_DTYPES, check_integers, check_range, checked_names

NO_RELATION = -1


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
        object.__setattr__(self, "names", checked_names(self.names))
        check_integers("labels", self.labels, LABEL_DTYPES)
        if self.labels.dim() < 2:
            raise ValueError(
                f"labels must have at least 2 dimensions, [..., query, key]; got {list(self.labels.shape)}. "
                "Give a label for each pair."
            )
        check_range("labels", self.labels, NO_RELATION, self.num_labels, "Give each label a name.")

    def __repr__(self) -> str:
        """Shape and dtype of the labels, and the first names."""
        labels = f"{list(self.labels.shape)} {str(self.labels.dtype).removeprefix('torch.')}"
        shown = ", ".join(map(repr, self.names[:3])) + (", ..." if self.num_labels > 3 else "")
        return f"Relations(labels={labels}, num_labels={self.num_labels}, names=({shown}))"

    @property
    def num_labels(self) -> int:
        """Rows of a table for these labels."""
        return len(self.names)


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
    return named(labels, product(first.names, second.names), dtype)


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


def named(labels: Tensor, names: tuple[str, ...], dtype: torch.dtype) -> Relations:
    if dtype not in LABEL_DTYPES:
        raise TypeError(f"dtype must be int64, int32, int16 or int8; got {dtype}. Labels are integers or -1.")
    largest = torch.iinfo(dtype).max
    if len(names) - 1 > largest:
        raise ValueError(
            f"dtype must hold the largest label = {len(names) - 1}; got {dtype}, which ends at {largest}. "
            "Take a wider one, or clip more."
        )
    return Relations(labels.to(dtype), names)


def product(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{a}, {b}" for a in first for b in second)


def _check_relations(name: str, relations: Relations) -> None:
    if not isinstance(relations, Relations):
        raise TypeError(
            f"{name} must be Relations; got {type(relations).__name__}. "
            "Make them with a function of relpos.relations, or of labels and names."
        )
