"""Groups of near-duplicate texts, found exactly: equal words, or many word pairs in common.

Prefix filtering (Chaudhuri et al. 2006; Bayardo et al. 2007) finds all sets of word pairs with a Jaccard
index of at least t: when the members of each set are sorted by rarity, two such sets share one of their
first n - ceil(t n) + 1 members. Unlike MinHash it misses no pair at or above the threshold.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from relpos.translation.corpora.words import word_key

Bigram = tuple[str, str]


class DisjointSets:
    """A partition of the numbers 0..size-1 into groups, which can be merged (union-find)."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, item: int) -> int:
        """The representative of the item's group, its smallest number."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(self, a: int, b: int) -> None:
        """Merge the groups of a and b."""
        a, b = self.find(a), self.find(b)
        self._parent[max(a, b)] = min(a, b)


def join_near_duplicates(texts: Iterable[str], groups: DisjointSets, similarity: float) -> None:
    """Merge the groups of texts with equal `word_key`, or a Jaccard index of word pairs >= similarity."""
    first: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts):
        groups.union(number, first.setdefault(word_key(text), number))
    bigrams = [(set(pairwise(words)), number) for words, number in first.items() if len(words) > 1]
    counts: Counter[Bigram] = Counter()
    for members, _ in bigrams:
        counts.update(members)
    # a word pair that occurs once cannot be shared; it still counts in the size of its set
    sets = [
        (len(members), sorted((m for m in members if counts[m] > 1), key=lambda m: (counts[m], m)), number)
        for members, number in bigrams
    ]
    sets.sort(key=lambda entry: entry[0])
    _join_similar(sets, groups, similarity)


def _join_similar(
    sets: Sequence[tuple[int, list[Bigram], int]], groups: DisjointSets, similarity: float
) -> None:
    # for each word pair, the sets seen so far (none larger than the present one) with it in their prefix
    index: defaultdict[Bigram, list[int]] = defaultdict(list)
    shared = [frozenset(members) for _, members, _ in sets]
    for now, (size, members, number) in enumerate(sets):
        smallest = math.ceil(similarity * size - 1e-9)
        # members that occur once would come first in the order of rarity
        prefix = members[: max(0, size - smallest + 1 - (size - len(members)))]
        tried: set[int] = set()
        for member in prefix:
            for other in reversed(index[member]):
                other_size, _, other_number = sets[other]
                if other_size < smallest:
                    # the sets are sorted by size, so the earlier ones are smaller still
                    break
                if other in tried:
                    continue
                tried.add(other)
                if groups.find(number) == groups.find(other_number):
                    continue
                common = len(shared[now] & shared[other])
                if common >= similarity * (size + other_size - common) - 1e-9:
                    groups.union(number, other_number)
            index[member].append(now)
