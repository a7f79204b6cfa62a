"""The parts of attention add up to the reference, and numbers for pairs are told apart by distance."""

import math

import pytest
import torch
from torch import Tensor

from relpos import reference, relative_attention
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


META = torch.device("meta")
POSITION = "It is the position of the first query among the keys."


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": None}, TypeError, "x must be a tensor; got NoneType. Make it a tensor."),
        ({"x": [[1.0]]}, TypeError, "x must be a tensor; got list. Make it a tensor."),
        *(
            (
                {"x": torch.zeros(1, 2, 3, 4, dtype=dtype)},
                TypeError,
                f"x must be float64, float32, bfloat16 or float16; got {dtype}. Convert it with .to().",
            )
            for dtype in (torch.int64, torch.bool, torch.complex64)
        ),
        (
            {"x": torch.zeros(1, 2, 3, 4).to_sparse()},
            TypeError,
            "x must be a dense tensor; got layout torch.sparse_coo. Convert it with .to_dense().",
        ),
        *(
            (
                {"x": torch.zeros(shape)},
                ValueError,
                f"x must have 4 dimensions, [batch, heads, query, key]; got {list(shape)}. "
                "Unsqueeze what is missing.",
            )
            for shape in ((), (3, 4), (2, 3, 4), (1, 1, 2, 3, 4))
        ),
        *(
            (
                {"max_distance": wrong},
                TypeError,
                f"max_distance must be {none}an integer k, or two integers (left, right); got {wrong!r}. "
                "Give one of these.",
            )
            for wrong, none in ((None, ""), (1.0, "None, "), (True, "None, "), ((1,), "None, "))
        ),
        (
            {"max_distance": (2, -1)},
            ValueError,
            "max_distance must be at least 0; got (2, -1). "
            "It counts tokens: left before the query, right after it.",
        ),
        (
            {"query_start": None},
            TypeError,
            "query_start must be an integer or an integer tensor [batch]; got NoneType. Leave it out for 0.",
        ),
        *(
            (
                {"query_start": wrong},
                TypeError,
                f"query_start must be an integer or an integer tensor [batch]; got {kind}. {POSITION}",
            )
            for wrong, kind in ((1.0, "float"), (True, "bool"), ("1", "str"), ([0], "list"))
        ),
        (
            {"query_start": torch.zeros(1)},
            TypeError,
            "query_start must be a tensor of integers; got torch.float32. Convert it with .long().",
        ),
        *(
            (
                {"query_start": torch.zeros(shape, dtype=torch.int64)},
                ValueError,
                f"query_start must be [batch] = [1]; got {list(shape)}. Give one number for each sequence.",
            )
            for shape in ((), (2,), (1, 1))
        ),
        (
            {"query_start": 2**70},
            ValueError,
            f"query_start must be between -2**62 and 2**62; got {2**70}. {POSITION}",
        ),
        (
            {"query_start": torch.zeros(1, dtype=torch.int64, device=META)},
            ValueError,
            "query_start must be on the device of x = cpu; got meta. Move it with .to().",
        ),
        ({"where": True}, TypeError, "where must be a bool tensor or None; got bool. Make it a tensor."),
        *(
            (
                {"where": torch.ones(3, 4, dtype=dtype)},
                TypeError,
                f"where must be a bool tensor or None; got {dtype}. Convert it with .bool().",
            )
            for dtype in (torch.float32, torch.int64)
        ),
        *(
            (
                {"where": torch.ones(shape, dtype=torch.bool)},
                ValueError,
                "where must be broadcastable to [batch, heads, query, key] = [1, 2, 3, 4]; "
                f"got {list(shape)}. Unsqueeze the dimensions that it is shared over: "
                "of [batch, query, key] give where[:, None].",
            )
            for shape in ((4, 3), (2, 2, 3, 4), (3, 3, 4), (1, 1, 2, 3, 4))
        ),
        (
            {"where": torch.ones(3, 4, dtype=torch.bool, device=META)},
            ValueError,
            "where must be on the device of x = cpu; got meta. Move it with .to().",
        ),
        *(
            (
                {"reduction": wrong},
                ValueError,
                f"reduction must be 'mean' or 'sum'; got {wrong!r}. Give one of these.",
            )
            for wrong in (None, "max", 1)
        ),
    ],
    ids=lambda x: x[:60] if isinstance(x, str) else "",
)
def test_by_distance_refuses_what_it_cannot_sort(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        by_distance(**{"x": torch.zeros(1, 2, 3, 4), "max_distance": 1} | changes)
    assert str(raised.value) == message
