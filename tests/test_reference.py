"""The reference against numbers worked out by hand and against finite differences; other tests rest on it."""

import math

import pytest
import torch
from torch import Tensor

from conformance.cases import TENSORS, case, make
from relpos import relative_attention

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)


def column(*numbers: float) -> Tensor:
    """[1, 1, length, 1]: one sentence, one head, width one."""
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def table(*numbers: float) -> Tensor:
    """[labels, 1]"""
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def attend(*args, **kwargs) -> Tensor:
    return relative_attention(*args, **kwargs, backend="reference")


def assert_numbers(found: Tensor, *numbers: float) -> None:
    torch.testing.assert_close(
        found.flatten(), torch.tensor(numbers, dtype=torch.float64), atol=1e-12, rtol=0
    )


# Two tokens, k = 1, width 1, so that the scale is 1. Keys are 0: only positions speak.
#
#   query 1, 2     value 10, 20     rel_k ln 2, 0, ln 3     rel_v -5, 1, 7
#   (rows: one before, itself, one after)
#
#   token 0: logits   itself 1*0 = 0       after  1*ln 3 = ln 3      exp 1, 3    weights 1/4, 3/4
#            values   10 + 1 = 11          20 + 7 = 27               out (11 + 81) / 4 = 23
#   token 1: logits   before 2*ln 2 = ln 4 itself 2*0 = 0            exp 4, 1    weights 4/5, 1/5
#            values   10 - 5 = 5           20 + 1 = 21               out (20 + 21) / 5 = 8.2
QUERY, KEY, VALUE = column(1, 2), column(0, 0), column(10, 20)
REL_K, REL_V = table(LN2, 0, LN3), table(-5, 1, 7)


def test_two_tokens_by_hand() -> None:
    out, lse = attend(QUERY, KEY, VALUE, REL_K, REL_V, return_lse=True)
    assert_numbers(out, 23, 8.2)
    assert_numbers(lse, math.log(4), math.log(5))


def test_two_tokens_without_tables_by_hand() -> None:
    # keys alone:    token 0 (10 + 3*20) / 4 = 17.5     token 1 (4*10 + 20) / 5 = 12
    # values alone:  weights 1/2: (11 + 27) / 2 = 19    (5 + 21) / 2 = 13
    # neither:       (10 + 20) / 2 = 15
    assert_numbers(attend(QUERY, KEY, VALUE, REL_K, None), 17.5, 12)
    assert_numbers(attend(QUERY, KEY, VALUE, None, REL_V), 19, 13)
    assert_numbers(attend(QUERY, KEY, VALUE, None, None), 15, 15)


def test_scale_by_hand() -> None:
    # scale 2: token 0 exp(2 ln 3) = 9: (11 + 9*27) / 10 = 25.4    token 1 exp(4 ln 2) = 16: (16*5 + 21) / 17
    assert_numbers(attend(QUERY, KEY, VALUE, REL_K, REL_V, scale=2.0), 25.4, 101 / 17)
    # width 4 with the numbers in the first place only: scale 1/2
    wide = [torch.nn.functional.pad(x, (0, 3)) for x in (QUERY, KEY, REL_K)]
    # token 0 exp(ln(3)/2) = sqrt 3, token 1 exp(ln 2) = 2: (2*5 + 21) / 3
    root = math.sqrt(3)
    out = attend(wide[0], wide[1], VALUE, wide[2], REL_V)
    assert_numbers(out, (11 + root * 27) / (1 + root), 31 / 3)


def test_gradients_of_two_tokens_by_hand() -> None:
    # of out[0] = w0*x0 + w1*x1, w = 1/4, 3/4, x = 11, 27: d out / d logit1 = w1 * (x1 - out) = 3
    # and for logit0 -3
    #   query[0]: -3*0 + 3*ln 3    key: 1*-3, 1*3    value: 1/4, 3/4    rel_k: 0, -3, 3    rel_v: 0, 1/4, 3/4
    leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE, REL_K, REL_V)]
    grads = torch.autograd.grad(attend(*leaves)[0, 0, 0, 0], leaves)
    for grad, numbers in zip(
        grads, [(3 * LN3, 0), (-3, 3), (0.25, 0.75), (0, -3, 3), (0, 0.25, 0.75)], strict=True
    ):
        assert_numbers(grad, *numbers)


# Three tokens, left 1 and right 0: row 0 is "one before or more", row 1 "itself or after".
#
#   query 1, 1, 1    key 0, ln 2, ln 4    value 0, 9, 18    rel_k ln 3, 0    rel_v 100, 0
#
#   exp of logits   token 0: 1 2 4    token 1: 3*1 2 4         token 2: 3*1 3*2 4
#   out             (18 + 72) / 7     (3*100 + 18 + 72) / 9    (3*100 + 6*109 + 72) / 13
THREE = (column(1, 1, 1), column(0, LN2, LN4), column(0, 9, 18), table(LN3, 0), table(100, 0))


def test_three_tokens_with_unequal_sides_by_hand() -> None:
    assert_numbers(attend(*THREE, max_distance=(1, 0)), 90 / 7, 390 / 9, 1026 / 13)


def test_masks_by_hand() -> None:
    # causal: token 0 sees itself: 0. Token 1: (300 + 18) / 5 = 63.6. Token 2 as before.
    assert_numbers(attend(*THREE, max_distance=(1, 0), is_causal=True), 0, 63.6, 1026 / 13)
    # two keys exist: (0 + 18) / 3 = 6, (300 + 18) / 5 = 63.6, (300 + 654) / 9 = 106
    assert_numbers(attend(*THREE, max_distance=(1, 0), key_lengths=torch.tensor([2])), 6, 63.6, 106)
    # no key for token 0; the middle key for token 1: 9; the first for token 2: 100
    mask = torch.tensor([[False, False, False], [False, True, False], [True, False, False]])
    out, lse = attend(*THREE, max_distance=(1, 0), attn_mask=mask, return_lse=True)
    assert_numbers(out, 0, 9, 100)
    assert_numbers(lse, -math.inf, LN2, LN3)
    # ln 7 added to the last key: exp 28: (18 + 28*18) / 31, (318 + 504) / 33, (954 + 504) / 37
    out = attend(
        *THREE, max_distance=(1, 0), attn_mask=torch.tensor([0, 0, math.log(7)], dtype=torch.float64)
    )
    assert_numbers(out, 522 / 31, 822 / 33, 1458 / 37)


def test_query_start_by_hand() -> None:
    last = (THREE[0][:, :, :1], *THREE[1:])
    assert_numbers(attend(*last, max_distance=(1, 0), query_start=2), 1026 / 13)
    assert_numbers(attend(*last, max_distance=(1, 0), query_start=1, is_causal=True), 63.6)
    two = [x.expand(2, -1, -1, -1) for x in last[:3]]
    out = attend(*two, *last[3:], max_distance=(1, 0), query_start=torch.tensor([1, 2]))
    assert_numbers(out, 390 / 9, 1026 / 13)


def test_tables_of_each_head_and_shared_keys_by_hand() -> None:
    # two query heads on the key head of the first example; the second head has the tables' halves exchanged
    #   head 1, token 0: after 1*ln 2, exp 1, 2: (11 + 2*15) / 3
    #   head 1, token 1: before 2*ln 3, exp 9, 1: (9*17 + 21) / 10
    query = QUERY.expand(1, 2, 2, 1)
    rel_k, rel_v = torch.stack([REL_K, REL_K.flip(0)]), torch.stack([REL_V, REL_V.flip(0)])
    out = attend(query, KEY, VALUE, rel_k, rel_v)
    assert_numbers(out, 23, 8.2, 41 / 3, 17.4)


def test_dropped_weights_are_missing_from_both_value_terms() -> None:
    # p = 1/2: what stays is doubled. Each token keeps all, the first, the second or none of its two terms.
    torch.manual_seed(0)
    seen = set()
    for _ in range(40):
        out = attend(QUERY, KEY, VALUE, REL_K, REL_V, dropout_p=0.5)
        seen.add(round(out[0, 0, 0, 0].item(), 9))
    # the terms of token 0 are 11/4 and 81/4
    assert seen == {0.0, 2 * 11 / 4, 2 * 81 / 4, 2 * 23.0}


@pytest.mark.parametrize(
    "name",
    [
        "length 2",
        "more keys than queries",
        "a start for each sequence, causal",
        "right over left",
        "per head and tied",
        "grouped heads, a start each",
        "mask: float inf",
        "one sentence is empty",
        "k = 0, causal, per head",
        "tables: neither, masked",
    ],
)
def test_gradients_equal_finite_differences(name: str) -> None:
    arguments = make(case(name))
    is_tied = arguments["rel_k"] is not None and arguments["rel_v"] is arguments["rel_k"]
    names = [name for name in TENSORS if arguments[name] is not None and not (name == "rel_v" and is_tied)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = arguments | dict(zip(names, tensors, strict=True))
        if is_tied:
            given["rel_v"] = given["rel_k"]
        out, lse = attend(**given, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, [arguments[name] for name in names])
