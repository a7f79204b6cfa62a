"""What attention refuses: each argument, wrong in kind, dtype, device, size or range.

A message names the argument first, then the numbers that it must have and has. One whole message is compared
for each kind.
"""

import functools
import math
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from refusals import refuses
from relpos import explain_backends, relation_attention, relative_attention
from relpos.decompose import decompose

Refusal = tuple[
    type[Exception], str, dict, tuple
]  # error, who is named, changed arguments, what else is said

SHAPES = {"query": (2, 4, 5, 8), "key": (2, 4, 5, 8), "value": (2, 4, 5, 8), "rel_k": (5, 8), "rel_v": (5, 8)}
META = torch.device("meta")
# what looks like numbers, bools or tensors and is none
FOREIGN = [np.float32(1), np.int64(1), np.bool_(True), np.zeros((5, 5)), Fraction(1, 2)]


def arguments(**changes) -> dict:
    """Two sentences of five tokens, four heads of width 8, k = 2; with changes."""
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()} | changes


def related(**changes) -> dict:
    """What `relation_attention` takes: five labels, no distances; with changes."""
    return arguments(relations=torch.zeros(5, 5, dtype=torch.int64)) | changes


def integers(*numbers: int, **options) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, **options)


def kind(x: object) -> str:
    """What an error calls the kind of a thing."""
    name = type(x).__name__
    return (
        name if type(x).__module__ == "builtins" else f"{type(x).__module__}.{name}".replace("bool_", "bool")
    )


def kinds_of_tensors() -> Iterator[Refusal]:
    """No tensor; a tensor of another layout, dtype or device."""
    for name, shape in SHAPES.items():
        for x in ([1.0], 3, True, "x", *FOREIGN, *([] if name.startswith("rel_") else [None])):
            yield TypeError, name, {name: x}, (kind(x),)
        ragged = [torch.zeros(5, 8), torch.zeros(3, 8)]
        jagged = torch.nested.nested_tensor(ragged, layout=torch.jagged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nested tensors of this layout are a prototype
            nested = torch.nested.nested_tensor(ragged)
        for x, said in ((torch.zeros(shape).to_sparse(), "sparse"), (jagged, "jagged"), (nested, "nested")):
            yield TypeError, name, {name: x}, ("dense", said, "key_lengths")
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
            yield TypeError, name, {name: torch.zeros(shape).to(dtype)}, (dtype,)
        if name != "query":
            yield ValueError, name, {name: torch.zeros(shape, device=META)}, ("cpu", "meta")
    for name in ("key", "value"):
        for dtype in (torch.float64, torch.float16):
            changed = {name: torch.zeros(SHAPES[name], dtype=dtype)}
            yield TypeError, name, changed, (torch.float32, dtype)


def shapes_of_tensors() -> Iterator[Refusal]:
    """Ranks, and sizes that disagree."""
    for name in SHAPES:
        for shape in ((), (8,), (5, 8), (4, 5, 8), (1, 4, 5, 8), (1, 2, 4, 5, 8)):
            if len(shape) not in ((2, 3) if name.startswith("rel_") else (4,)):
                yield ValueError, name, {name: torch.zeros(shape)}, (list(shape),)
    heads = [(4, 3), (4, 8), (4, 0), (0, 4), (0, 0)]
    for name, shapes, said in (
        ("key", {"key": (1, 4, 5, 8)}, (2, 1)),
        ("value", {"value": (3, 4, 5, 8)}, (2, 3)),
        ("key", {"key": (2, 4, 5, 7)}, ("d_k", 8, 7)),
        ("query", {"query": (2, 4, 5, 0), "key": (2, 4, 5, 0), "rel_k": None}, ("d_k", 1, 0)),
        ("value", {"value": (2, 2, 5, 8)}, ("heads", 4, 2)),
        ("value", {"key": (2, 2, 5, 8)}, ("heads", 2, 4)),
        ("value", {"value": (2, 4, 6, 8)}, ("length", 5, 6)),
        *(
            ("key", {"query": (2, q, 5, 8), "key": (2, k, 5, 8), "value": (2, k, 5, 8)}, ("heads", q, k))
            for q, k in heads
        ),
        ("rel_k", {"rel_k": (5, 32)}, ("d_k", 8, 32)),
        ("rel_v", {"rel_v": (5, 32)}, ("d_v", 8, 32)),
        ("rel_k", {"rel_k": (5, 0)}, ("d_k", 8, 0)),
        *((f"rel_{x}", {f"rel_{x}": (n, 5, 8)}, ("head", 4, n)) for x in "kv" for n in (1, 2)),
        ("rel_k", {"rel_k": (0, 8)}, (1, 0, "None")),
        ("rel_v", {"rel_v": (0, 8)}, (1, 0, "None")),
    ):
        yield ValueError, name, {x: None if y is None else torch.zeros(y) for x, y in shapes.items()}, said


def distances() -> Iterator[Refusal]:
    """What counts tokens: rows of tables, max_distance, query_start, key_lengths."""
    yield ValueError, "rel_k", {"rel_k": torch.zeros(4, 8)}, ("odd", 4, "max_distance=(left, right)")
    yield ValueError, "rel_v", {"rel_k": None, "rel_v": torch.zeros(4, 8)}, ("odd", 4)
    yield ValueError, "rel_v", {"rel_v": torch.zeros(7, 8)}, ("rel_k", 5, 7)
    for n in (0, 1, 3, 6):
        yield ValueError, "query_start", {"query": torch.zeros(2, 4, n, 8)}, (n, 5)
    for x in (1.0, "2", True, (2,), (2, 2, 2), (2, 2.0), (True, 2), {2: 2}, torch.tensor(2), math.inf):
        yield TypeError, "max_distance", {"max_distance": x}, (repr(x),)
    for x in (-1, (2, -1), (-3, 7)):
        yield ValueError, "max_distance", {"max_distance": x}, (0, repr(x))
    for x, rows in ((5, 11), (0, 1), ((5, 5), 11), ((4, 1), 6), (2**70, 2**71 + 1)):
        yield ValueError, "rel_k", {"max_distance": x}, (rows, 5, "max_distance")
        yield ValueError, "rel_v", {"max_distance": x, "rel_k": None}, (rows, 5, "max_distance")
    for x in (math.nan, True, "1", [0, 0], (0, 0), *FOREIGN):
        yield TypeError, "query_start", {"query_start": x}, (kind(x),)
        yield TypeError, "key_lengths", {"key_lengths": x}, (kind(x),)
    for x in (2**62 + 1, -(2**62) - 1, 2**70, -(2**63)):
        yield ValueError, "query_start", {"query_start": x}, ("2**62", x)
        if -(2**63) <= x < 2**63:
            yield ValueError, "query_start", {"query_start": integers(0, x)}, ("2**62", x)
    for name in ("query_start", "key_lengths"):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            yield TypeError, name, {name: torch.zeros(2, dtype=dtype)}, ("integers", dtype)
        yield TypeError, name, {name: integers(1, 1).to_sparse()}, ("dense", "sparse")
        for x in (torch.tensor(5), integers(5), integers(0, 0, 0), integers(0, 0)[:, None]):
            yield ValueError, name, {name: x}, ([2], list(x.shape))
        yield ValueError, name, {name: integers(0, 0, device=META)}, ("cpu", "meta")
    for first, second, wrong in ((5, 6, 6), (-1, 5, -1), (9, -9, 9), (0, -(2**63), -(2**63))):
        yield ValueError, "key_lengths", {"key_lengths": integers(first, second)}, (0, 5, wrong)


def masks() -> Iterator[Refusal]:
    """attn_mask."""
    for x in ([[True]], True, 1.0, "causal", *FOREIGN):
        yield TypeError, "attn_mask", {"attn_mask": x}, (kind(x),)
    sparse = torch.ones(5, 5, dtype=torch.bool).to_sparse()
    yield TypeError, "attn_mask", {"attn_mask": sparse}, ("dense", "sparse")
    for dtype in (torch.int64, torch.uint8, torch.complex64):
        changed = {"attn_mask": torch.ones(5, 5, dtype=dtype)}
        yield TypeError, "attn_mask", changed, ("True = may attend", dtype)
    yield ValueError, "attn_mask", {"attn_mask": torch.zeros(5, 5, device=META)}, ("cpu", "meta")
    for shape in (
        *((4,), (0,), (2, 5), (5, 6), (0, 5), (2, 5, 5), (3, 1, 5, 5), (2, 3, 5, 5), (2, 1, 6, 5)),
        *((2, 1, 5, 0), (1, 2, 4, 5, 5), (1, 1, 1, 1, 1)),
    ):
        yield ValueError, "attn_mask", {"attn_mask": torch.zeros(shape)}, ([2, 4, 5, 5], list(shape))


def numbers_and_flags() -> Iterator[Refusal]:
    """is_causal, return_lse, dropout_p, scale."""
    for x in (1, None, "True", 1.0, [True], *FOREIGN, torch.tensor(True)):
        for name in ("is_causal", "return_lse"):
            yield TypeError, name, {name: x}, ("True or False", kind(x).replace("torch.", ""))
    for x in ("0.1", True, [0.1], 1j, torch.tensor(0.1), *FOREIGN):
        yield TypeError, "dropout_p", {"dropout_p": x}, (kind(x).replace("torch.", ""),)
        yield TypeError, "scale", {"scale": x}, (kind(x).replace("torch.", ""),)
    yield TypeError, "dropout_p", {"dropout_p": None}, ("NoneType",)
    for x in (1.5, 2, -0.1, math.nan, math.inf, -math.inf):
        yield ValueError, "dropout_p", {"dropout_p": x}, (0, 1, x)
    for x in (math.nan, math.inf, -math.inf, 10**400):
        yield ValueError, "scale", {"scale": x}, ("finite", x)


def labels() -> Iterator[Refusal]:
    """Tensors that are no labels, and labels that no row has."""
    for x in ([[0]], 3, None, "x", *FOREIGN):
        yield TypeError, "relations", {"relations": x}, (kind(x), ".labels")
    sparse = torch.ones(5, 5, dtype=torch.int64).to_sparse()
    yield TypeError, "relations", {"relations": sparse}, ("dense", "sparse")
    for dtype in (torch.float32, torch.bool, torch.complex64):
        yield TypeError, "relations", {"relations": torch.zeros(5, 5, dtype=dtype)}, (-1, dtype)
    on_meta = torch.zeros(5, 5, dtype=torch.int64, device=META)
    yield ValueError, "relations", {"relations": on_meta}, ("cpu", "meta")
    for shape in ((2, 5), (4,), (2, 5, 5), (3, 1, 5, 5), (2, 1, 5, 6), (1, 2, 4, 5, 5)):
        changed = {"relations": torch.zeros(shape, dtype=torch.int64)}
        yield ValueError, "relations", changed, ([2, 4, 5, 5], list(shape))
    for dtype in (torch.int64, torch.int8):
        for wrong in (-2, 5, 127, -128):
            x = torch.full((1, 5), -1, dtype=dtype)
            x[0, 3] = wrong
            yield ValueError, "relations", {"relations": x}, (-1, 4, wrong)
    yield ValueError, "rel_v", {"rel_v": torch.zeros(7, 8)}, ("rel_k", 5, 7, "label")


COMMON = [x for make in (kinds_of_tensors, shapes_of_tensors, masks, numbers_and_flags) for x in make()]
OF_DISTANCES, OF_LABELS = list(distances()), list(labels())


@pytest.mark.parametrize("call", [relative_attention, explain_backends, decompose])
def test_what_is_wrong_is_refused_by_name_and_number(call) -> None:
    lacks = {"dropout_p", "return_lse"} if call is decompose else set()
    for error, name, changes, said in COMMON + OF_DISTANCES:
        if not lacks & changes.keys():
            refuses(functools.partial(call, **arguments(**changes)), error, name, said)


def test_labels_are_refused_by_name_and_number_and_all_else_as_by_distance() -> None:
    for error, name, changes, said in COMMON + OF_LABELS:
        if "is_causal" not in changes:
            refuses(functools.partial(relation_attention, **related(**changes)), error, name, said)


def test_every_argument_is_refused_in_some_way_of_its_own() -> None:
    every = set(relative_attention.__kwdefaults__) - {"backend"} | set(SHAPES)
    assert {name for _, name, _, _ in COMMON + OF_DISTANCES} == every


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": 3}, "query must be a tensor; got int. Make it a tensor."),
        ({"rel_k": 3}, "rel_k must be a tensor or None; got int. Make it a tensor."),
        (
            {"key": torch.zeros(2, 4, 5, 8, dtype=torch.int64)},
            "key must be float64, float32, bfloat16 or float16; got torch.int64. Convert it with .to().",
        ),
        (
            {"key": torch.zeros(2, 4, 5, 8, device=META)},
            "key must be on the device of query = cpu; got meta. Move it with .to().",
        ),
        (
            {"key": torch.zeros(5, 8)},
            "key must have 4 dimensions, [batch, heads, length, dim]; got [5, 8]. "
            "Split the heads, and add a batch of one if there is none.",
        ),
        (
            {"rel_v": torch.zeros(5, 32)},
            "rel_v must have the width d_v of value = 8; got 32. Tables are as wide as one head.",
        ),
        (
            {"max_distance": 5},
            "rel_k must have left + right + 1 = 11 rows; got 5. Check max_distance.",
        ),
        (
            {"query": torch.zeros(2, 4, 3, 8)},
            "query_start must be given unless query and key have one length; got lengths 3 and 5. Give the "
            "position of the first query among the keys. Cross-attention has no relative positions.",
        ),
        (
            {"key_lengths": integers(5, 6)},
            "key_lengths must be between 0 and the length of key = 5; got 6. It counts the keys that exist.",
        ),
        (
            {"attn_mask": torch.zeros(2, 5, 5)},
            "attn_mask must be broadcastable to [batch, heads, query, key] = [2, 4, 5, 5]; got [2, 5, 5]. "
            "Unsqueeze the dimensions that it is shared over: of [batch, query, key] give "
            "attn_mask[:, None].",
        ),
        ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1; got 1.5. It is a probability."),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else "",
)
def test_a_message_says_what_must_be_what_came_and_what_to_do(changes: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(message)}$"):
        relative_attention(**arguments(**changes))
