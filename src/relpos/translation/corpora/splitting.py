"""Splitting a corpus into training and held-out parts that share no near-duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import datasets
import numpy as np

from relpos.translation.corpora.neighbours import Groups, join_neighbours
from relpos.translation.errors import InputError

_SIMILARITY = 0.6
_REST = "train"

# a group that is more than this share of a held-out part would fill it with one kind of sentence
_LARGEST_SHARE = 0.1


def split(
    dataset: datasets.Dataset, shares: Mapping[str, float], seed: int = 0
) -> dict[str, datasets.Dataset]:
    """Split pairs into parts so that near-duplicates are never in two of them.

    Two pairs are near-duplicates where, on the source side or on the target side, their skeletons are equal
    (the words in lower case, without digits, punctuation and placeholders) or the Jaccard index of the
    skeletons' sets of neighbouring words is 0.6 or more. Groups are the closure of that: what is a
    near-duplicate of a member is a member. A group is in one part as a whole. This holds exactly, for every
    two pairs; nothing is sampled.

    A hash of the group's texts and the seed decides the part, so neither the order of the rows nor the
    machine matters. A group with more pairs than a tenth of a part's share never goes there, but
    to "train". Sizes follow the shares up to chance. Rows keep their order.

    Args:
        dataset: with columns `source` and `target`. Word pairs are kept in memory, about 1 KB a pair.
        shares: fraction of the pairs for each part, for example {"validation": 0.02, "test": 0.02}; together
            under 1.
        seed: another seed, another split.
    Returns:
        The parts by name, and "train" with the rest.
    Raises:
        InputError: a share is out of range, or the name "train" is given.
    """
    _check(shares)
    group_of = _group(dataset)
    part_of_group = _choose_parts(dataset, group_of, shares, seed)
    parts = {
        name: np.flatnonzero(part_of_group[group_of] == number)
        for number, name in enumerate([*shares, _REST])
    }
    return {name: dataset.select(rows) for name, rows in parts.items()}


def _check(shares: Mapping[str, float]) -> None:
    if _REST in shares:
        raise InputError('"train" is what the other parts leave; give shares for the other parts only.')
    if any(share < 0 for share in shares.values()) or sum(shares.values()) >= 1:
        raise InputError(f"shares must be 0 or more and together under 1; got {dict(shares)}.")


def _group(dataset: datasets.Dataset) -> np.ndarray:
    """Return the number of each row's group, 0..groups-1."""
    groups = Groups(len(dataset))
    for side in ("source", "target"):
        join_neighbours((text for batch in dataset.iter(10_000) for text in batch[side]), groups, _SIMILARITY)
    roots = np.fromiter((groups.find(row) for row in range(len(dataset))), dtype=np.int64, count=len(dataset))
    return np.unique(roots, return_inverse=True)[1]


def _choose_parts(
    dataset: datasets.Dataset, group_of: np.ndarray, shares: Mapping[str, float], seed: int
) -> np.ndarray:
    """Return the number of each group's part; the last number is the rest."""
    sizes = np.bincount(group_of)
    # the least of the members' hashes names the group in any order of rows; hashed again, it is spread evenly
    names = np.full(len(sizes), np.iinfo(np.uint64).max, dtype=np.uint64)
    hashes = (
        _hash(f"{source}\n{target}")
        for batch in dataset.iter(10_000)
        for source, target in zip(batch["source"], batch["target"], strict=True)
    )
    np.minimum.at(names, group_of, np.fromiter(hashes, dtype=np.uint64, count=len(dataset)))
    places = np.fromiter(
        (_hash(f"{seed} {name}") / 2**64 for name in names), dtype=np.float64, count=len(names)
    )
    parts = np.full(len(sizes), len(shares), dtype=np.int64)
    start = 0.0
    for number, share in enumerate(shares.values()):
        is_small = sizes <= max(1.0, _LARGEST_SHARE * share * len(dataset))
        parts[(places >= start) & (places < start + share) & is_small] = number
        start += share
    return parts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
