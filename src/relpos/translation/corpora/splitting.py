"""Splitting a corpus into training and held-out parts without near-duplicates across parts."""

import hashlib
from collections.abc import Mapping

import datasets
import numpy as np

from relpos.translation.corpora.near_duplicates import DisjointSets, join_near_duplicates
from relpos.translation.errors import InputError

_SIMILARITY = 0.6
_REST = "train"

# a larger group, as a share of a held-out part, would fill it with one kind of sentence
_LARGEST_SHARE = 0.1


def split(
    dataset: datasets.Dataset, shares: Mapping[str, float], seed: int = 0
) -> dict[str, datasets.Dataset]:
    """Split pairs into parts so that no two parts share a near-duplicate.

    Two pairs are near-duplicates if, on the source side or on the target side, their word keys are equal
    (the words in lower case, without digits, punctuation and placeholders) or the Jaccard index of their
    sets of adjacent word pairs is 0.6 or more. Groups are the transitive closure of that relation, and a
    group is never divided. The search is exact: every two pairs are considered, none are sampled.

    A hash of the group's texts and the seed decides the part, so the split depends neither on the order of
    the rows nor on the machine. A group with more pairs than a tenth of a part's share goes to "train". Sizes
    follow the shares in expectation. Rows keep their order.

    Args:
        dataset: with columns `source` and `target`. Word pairs are held in memory, about 1 KB a pair.
        shares: fraction of the pairs for each part, for example {"validation": 0.02, "test": 0.02}; their
            sum must be under 1.
        seed: of the split.
    Returns:
        The parts by name, and "train" with the remaining pairs.
    Raises:
        InputError: a share is out of range, or a part is called "train".
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
        raise InputError('"train" gets the remaining pairs; give shares for the other parts only.')
    if any(share < 0 for share in shares.values()) or sum(shares.values()) >= 1:
        raise InputError(f"shares must be 0 or more and together under 1; got {dict(shares)}.")


def _group(dataset: datasets.Dataset) -> np.ndarray:
    """The number of each row's group, 0..groups-1."""
    groups = DisjointSets(len(dataset))
    for side in ("source", "target"):
        join_near_duplicates(
            (text for batch in dataset.iter(10_000) for text in batch[side]), groups, _SIMILARITY
        )
    roots = np.fromiter((groups.find(row) for row in range(len(dataset))), dtype=np.int64, count=len(dataset))
    return np.unique(roots, return_inverse=True)[1]


def _choose_parts(
    dataset: datasets.Dataset, group_of: np.ndarray, shares: Mapping[str, float], seed: int
) -> np.ndarray:
    """The number of each group's part; the last number is "train"."""
    sizes = np.bincount(group_of)
    # the minimum of the members' hashes ignores the order of rows; a second hash makes it uniform
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
