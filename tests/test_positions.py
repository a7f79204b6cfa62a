"""Distances, labels, and what max_distance may be."""

import pytest
import torch

from refusals import refuses
from relpos._positions import clip_distance, distances, label_table, resolve_max_distance

CPU = torch.device("cpu")


def test_distance_is_key_minus_query() -> None:
    assert distances(3, 3, 0, CPU).tolist() == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]


def test_four_tokens_have_seven_labels_as_in_the_paper() -> None:
    # index 0 is i-3, index 3 the token itself, index 6 i+3
    assert label_table(4, 4, 0, 3, 3, CPU).tolist() == [
        [3, 4, 5, 6],
        [2, 3, 4, 5],
        [1, 2, 3, 4],
        [0, 1, 2, 3],
    ]


def test_distances_beyond_a_side_share_its_last_row() -> None:
    assert clip_distance(torch.arange(-4, 5), 2, 1).tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 3]
    assert label_table(3, 3, 0, 0, 0, CPU).unique().tolist() == [0]


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 1), (3, 0), (0, 3), (2, 5), (40, 40)])
@pytest.mark.parametrize(
    ("n", "m", "start"), [(1, 1, 0), (4, 4, 0), (5, 5, 0), (3, 9, 6), (3, 9, -2), (9, 3, 1)]
)
def test_every_label_equals_the_definition(left: int, right: int, n: int, m: int, start: int) -> None:
    found = label_table(n, m, start, left, right, CPU)
    for i in range(n):
        for j in range(m):
            assert found[i, j] == min(max(j - (start + i), -left), right) + left


def test_a_start_for_each_sequence_gives_labels_for_each_sequence() -> None:
    starts = torch.tensor([0, 4, -1], dtype=torch.int32)
    found = label_table(2, 5, starts, 2, 2, CPU)
    assert found.shape == (3, 2, 5)
    for labels, start in zip(found, starts.tolist(), strict=True):
        assert labels.equal(label_table(2, 5, start, 2, 2, CPU))


def test_lengths_of_zero_give_empty_labels() -> None:
    assert label_table(0, 0, 0, 1, 1, CPU).shape == (0, 0)
    assert label_table(0, 4, 4, 1, 1, CPU).shape == (0, 4)
    assert label_table(2, 5, torch.zeros(0, dtype=torch.int64), 1, 1, CPU).shape == (0, 2, 5)


@pytest.mark.parametrize(
    ("max_distance", "rel_k_labels", "rel_v_labels", "sides"),
    [
        (None, 33, 33, (16, 16)),
        (None, 7, None, (3, 3)),
        (None, None, 7, (3, 3)),
        (None, 1, 1, (0, 0)),
        (None, None, None, (0, 0)),
        (0, 1, 1, (0, 0)),
        (3, 7, 7, (3, 3)),
        ((2, 4), 7, 7, (2, 4)),
        ([2, 4], 7, None, (2, 4)),
        ((2, 4), None, None, (2, 4)),
    ],
)
def test_max_distance_is_given_or_read_off_the_tables(
    max_distance, rel_k_labels, rel_v_labels, sides
) -> None:
    assert resolve_max_distance(max_distance, rel_k_labels, rel_v_labels) == sides


@pytest.mark.parametrize(
    ("arguments", "error", "name", "said"),
    [
        (((5, 5), 9, 11), ValueError, "rel_k", (11, 9)),
        ((5, 11, 9), ValueError, "rel_v", (11, 9)),
        ((None, 8, None), ValueError, "rel_k", ("odd", 8)),
        ((None, 7, 9), ValueError, "rel_v", (7, 9)),
        ((-1, 1, 1), ValueError, "max_distance", (0, -1)),
        (((2, -1), 2, 2), ValueError, "max_distance", (0, (2, -1))),
        *(
            ((wrong, 3, 3), TypeError, "max_distance", ("left, right", repr(wrong)))
            for wrong in (1.0, "1", True, (1,), (1, 1, 1), (1, 1.0))
        ),
    ],
)
def test_a_wrong_max_distance_is_refused_by_number(arguments, error, name, said) -> None:
    refuses(lambda: resolve_max_distance(*arguments), error, name, said)
