"""The parts of attention add up to the reference, and numbers for pairs are told apart by distance."""

import functools
import math

import pytest
import torch
from torch import Tensor

from refusals import refuses
from relpos import _reference as reference
from relpos import relative_attention
from relpos._inputs import check
from relpos.decompose import by_distance, decompose

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def _tensors(
    *,
    heads: int = 4,
    key_heads: int = 4,
    queries: int = 7,
    keys: int = 7,
    rows: int = 5,
    per_head: bool = False,
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, 6), (2, key_heads, keys, 6), (2, key_heads, keys, 3)]
    tables = [(rows, 6), (rows, 3)]
    shapes += [(heads, *shape) for shape in tables] if per_head else tables
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


CALLS: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {}),
    "one table per head": ({"per_head": True}, {}),
    "causal": ({}, {"is_causal": True, "scale": 0.3}),
    "unequal sides": ({"rows": 4}, {"max_distance": (1, 2)}),
    "grouped queries": ({"key_heads": 2}, {}),
    "chunk after a cache": ({"queries": 3, "keys": 9}, {"query_start": 6, "is_causal": True}),
    "start of each sequence": ({"queries": 2}, {"query_start": torch.tensor([0, 5])}),
    "key lengths": ({}, {"key_lengths": torch.tensor([7, 0])}),
    "bool mask": ({}, {"attn_mask": torch.arange(49).view(7, 7) % 3 > 0}),
    "float mask": ({}, {"attn_mask": torch.linspace(-2, 2, 49, dtype=torch.float64).view(7, 7)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_parts_add_up_to_the_reference(name: str) -> None:
    shapes, options = CALLS[name]
    tensors = _tensors(**shapes)
    parts = decompose(*tensors, **options)
    out, _ = reference.run(check(*tensors, **options))
    torch.testing.assert_close(parts.content_out + parts.position_out, out, **TIGHT)


@pytest.mark.parametrize("name", CALLS)
def test_logits_without_one_table_or_the_content_are_the_other_part(name: str) -> None:
    shapes, options = CALLS[name]
    query, key, value, rel_k, rel_v = _tensors(**shapes)
    parts = decompose(query, key, value, rel_k, rel_v, **options)
    without_table = decompose(query, key, value, None, rel_v, **options)
    without_content = decompose(query, torch.zeros_like(key), value, rel_k, rel_v, **options)
    torch.testing.assert_close(parts.content_logits, without_table.content_logits, **TIGHT)
    torch.testing.assert_close(parts.position_logits, without_content.position_logits, **TIGHT)
    assert not without_table.position_logits.any()
    assert not without_content.content_logits[without_content.allowed].any()


@pytest.mark.parametrize("name", CALLS)
def test_weights_are_those_of_the_reference(name: str) -> None:
    shapes, options = CALLS[name]
    query, key, value, rel_k, rel_v = _tensors(**shapes)
    # attention over unit vectors returns its own weights
    unit = torch.eye(key.shape[2], dtype=key.dtype).expand(2, key.shape[1], -1, -1)
    expected, _ = reference.run(check(query, key, unit, rel_k, None, **options))
    parts = decompose(query, key, value, rel_k, rel_v, **options)
    torch.testing.assert_close(parts.weights, expected, **TIGHT)
    assert not parts.weights[~parts.allowed].any()


def test_float32_parts_add_up_to_relative_attention() -> None:
    tensors = [x.float() for x in _tensors()]
    parts = decompose(*tensors, is_causal=True)
    assert parts.weights.dtype == torch.float32
    torch.testing.assert_close(
        parts.content_out + parts.position_out, relative_attention(*tensors, is_causal=True)
    )


def test_absent_keys_may_hold_nan() -> None:
    query, key, value, rel_k, rel_v = _tensors()
    key[:, :, 5:], value[:, :, 5:] = math.nan, math.nan
    parts = decompose(query, key, value, rel_k, rel_v, key_lengths=torch.tensor([5, 5]))
    assert parts.content_out.isfinite().all()
    assert parts.content_logits.isfinite().all()


def test_wrong_arguments_are_refused_as_by_relative_attention() -> None:
    query, key, value, rel_k, rel_v = _tensors()
    with pytest.raises(ValueError, match=r"rel_k must have left \+ right \+ 1 = 7 rows; got 5"):
        decompose(query, key, value, rel_k, rel_v, max_distance=3)


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_a_table_hot_at_one_distance_peaks_there(distance: int) -> None:
    query, key, value, rel_k, rel_v = _tensors()
    query, rel_k = query.abs() + 0.1, torch.zeros_like(rel_k)
    rel_k[2 + distance] = 1.0
    parts = decompose(query, key, value, rel_k, rel_v)
    mean = by_distance(parts.position_logits, max_distance=2)
    assert (mean.argmax(-1) == 2 + distance).all()
    assert (mean.count_nonzero(-1) == 1).all()


def test_sums_and_means_by_distance_worked_by_hand() -> None:
    x = torch.arange(9.0).view(1, 1, 3, 3)
    assert by_distance(x, max_distance=1, reduction="sum").tolist() == [[6 + 3 + 7, 0 + 4 + 8, 1 + 5 + 2]]
    assert by_distance(x, max_distance=2).tolist() == [[6.0, 5.0, 4.0, 3.0, 2.0]]


def test_attention_by_distance_sums_to_one_for_each_query() -> None:
    parts = decompose(*_tensors(), is_causal=True)
    total = by_distance(parts.weights, max_distance=(6, 0), reduction="sum").sum(-1)
    torch.testing.assert_close(total, torch.full((4,), 2.0 * 7, dtype=torch.float64))


def test_pairs_that_do_not_count_may_hold_anything() -> None:
    x = torch.tensor([[0.0, math.nan], [2.0, 4.0]]).view(1, 1, 2, 2)
    where = torch.ones(2, 2, dtype=torch.bool).tril()
    assert by_distance(x, max_distance=(1, 0), where=where).tolist() == [[2.0, 2.0]]
    assert by_distance(x, max_distance=1, where=where)[0, 2].isnan()


def test_start_of_the_query_moves_the_distances() -> None:
    x = torch.arange(4.0).view(1, 1, 1, 4)
    assert by_distance(x, max_distance=3, query_start=3, reduction="sum").tolist() == [[0, 1, 2, 3, 0, 0, 0]]


def of_shapes(*shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


META, INTEGERS = torch.device("meta"), torch.int64
REFUSALS = {  # argument -> error, wrong values, what the message must say of each beside its shape or kind
    "kind of x": (TypeError, [None, [[1.0]]], ("tensor",)),
    "dtype of x": (
        TypeError,
        of_shapes((1, 2, 3, 4), dtype=INTEGERS) + of_shapes((1, 2, 3, 4), dtype=torch.bool),
        ("float64",),
    ),
    "layout of x": (TypeError, [torch.zeros(1, 2, 3, 4).to_sparse()], ("dense", "sparse_coo")),
    "rank of x": (ValueError, of_shapes((), (2, 3, 4), (1, 1, 2, 3, 4)), (4,)),
    "kind of max_distance": (TypeError, [None, 1.0, True, (1,)], ("left, right",)),
    "sign of max_distance": (ValueError, [(2, -1)], (0, (2, -1))),
    "kind of query_start": (TypeError, [None, 1.0, True, "1", [0]], ("integer",)),
    "dtype of query_start": (TypeError, [torch.zeros(1)], ("integers", torch.float32)),
    "shape of query_start": (ValueError, of_shapes((), (2,), (1, 1), dtype=INTEGERS), ([1],)),
    "range of query_start": (ValueError, [2**70], ("2**62", 2**70)),
    "device of query_start": (ValueError, [torch.zeros(1, dtype=INTEGERS, device=META)], ("cpu", "meta")),
    "kind of where": (TypeError, [True], ("bool",)),
    "dtype of where": (TypeError, of_shapes((3, 4)) + of_shapes((3, 4), dtype=INTEGERS), ("bool", "torch.")),
    "shape of where": (ValueError, of_shapes((4, 3), (2, 2, 3, 4), dtype=torch.bool), ([1, 2, 3, 4],)),
    "rank of where": (ValueError, of_shapes((1, 1, 2, 3, 4), dtype=torch.bool), ([1, 2, 3, 4],)),
    "device of where": (ValueError, [torch.ones(3, 4, dtype=torch.bool, device=META)], ("cpu", "meta")),
    "value of reduction": (ValueError, [None, "max", 1], ("'mean'", "'sum'")),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_by_distance_refuses_what_it_cannot_sort(fault: str) -> None:
    error, values, said = REFUSALS[fault]
    name = fault.rsplit(maxsplit=1)[-1]
    for x in values:
        came = list(x.shape) if fault.startswith(("shape", "rank")) else ""
        given = {"x": torch.zeros(1, 2, 3, 4), "max_distance": 1} | {name: x}
        refuses(functools.partial(by_distance, **given), error, name, (*said, came))
