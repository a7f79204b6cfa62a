"""Masks one by one and together, against loops."""

import itertools
import math

import pytest
import torch

from relpos._masks import causal_mask, combine_masks, key_mask, merge_masks

CPU = torch.device("cpu")


def test_causal_mask_allows_keys_up_to_the_query() -> None:
    assert causal_mask(2, 4, 1, CPU).tolist() == [[[[True, True, False, False], [True, True, True, False]]]]


def test_causal_mask_takes_a_start_for_each_sequence() -> None:
    found = causal_mask(2, 4, torch.tensor([0, 2]), CPU)
    assert found.shape == (2, 1, 2, 4)
    assert found[:1].equal(causal_mask(2, 4, 0, CPU))
    assert found[1:].equal(causal_mask(2, 4, 2, CPU))


def test_key_mask_counts_keys() -> None:
    assert key_mask(torch.tensor([0, 2, 3]), 3)[:, 0, 0].tolist() == [
        [False, False, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("start", [0, 3, "each"])
def test_masks_combine_pair_by_pair(
    is_causal: bool, has_lengths: bool, kind: str | None, start: int | str
) -> None:
    torch.manual_seed(0)
    b, h, n, m = 2, 3, 4, 6
    lengths = torch.tensor([2, 6]) if has_lengths else None
    starts = torch.tensor([0, 3]) if start == "each" else start
    mask = None
    if kind == "bool":
        mask = torch.rand(1, h, n, m) < 0.6
    elif kind == "float":
        mask = torch.randn(1, h, n, m).masked_fill(torch.rand(1, h, n, m) < 0.4, -math.inf)
    allowed, additive = combine_masks(
        n, m, starts, attn_mask=mask, key_lengths=lengths, is_causal=is_causal, device=CPU
    )
    assert (allowed is None) == (not is_causal and lengths is None and kind != "bool")
    assert additive is (mask if kind == "float" else None)
    bias, is_empty = merge_masks(allowed, additive, torch.float64)
    if bias is None:
        assert not is_causal
        assert lengths is None
        assert mask is None
        return
    wide = bias.expand(b, h, n, m)
    for s, head, i in itertools.product(range(b), range(h), range(n)):
        row = []
        for j in range(m):
            first = [0, 3][s] if start == "each" else start
            is_allowed = (not is_causal or j <= first + i) and (lengths is None or j < lengths[s])
            number = 0.0 if mask is None else mask[0, head, i, j].item()
            if kind == "bool":
                is_allowed, number = is_allowed and bool(number), 0.0
            row.append(number if is_allowed else -math.inf)
        is_row_empty = all(x == -math.inf for x in row)
        assert is_empty.expand(b, h, n, 1)[s, head, i, 0] == is_row_empty
        assert wide[s, head, i].tolist() == ([0.0] * m if is_row_empty else row)


def test_a_mask_is_only_as_large_as_what_it_says() -> None:
    lengths = torch.tensor([1, 2, 3])
    allowed, additive = combine_masks(
        9, 9, 0, attn_mask=None, key_lengths=lengths, is_causal=False, device=CPU
    )
    assert allowed.shape == (3, 1, 1, 9)
    bias, is_empty = merge_masks(allowed, additive, torch.float32)
    assert bias.shape == (3, 1, 1, 9)
    assert is_empty.shape == (3, 1, 1, 1)


def test_no_mask_costs_nothing() -> None:
    nothing = combine_masks(3, 3, 0, attn_mask=None, key_lengths=None, is_causal=False, device=CPU)
    assert nothing == (None, None)
    assert merge_masks(*nothing, torch.float32) == (None, None)


def test_the_callers_mask_is_left_as_it_was() -> None:
    mask = torch.zeros(1, 1, 2, 2)
    mask[0, 0, 0] = -math.inf
    before = mask.clone()
    merge_masks(torch.tensor([[[[False, True]]]]), mask, torch.float32)
    assert mask.equal(before)
