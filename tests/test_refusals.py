"""What attention refuses and in which words: each argument, wrong in kind, dtype, device, size or range.

Every message is compared whole: the argument, what it must be, what came, what to do.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from relpos import explain_backends, relation_attention, relative_attention
from relpos.decompose import decompose

Refusal = tuple[str, dict, type[Exception], str]  # what is wrong, changed arguments, error, message

SHAPES = {"query": (2, 4, 5, 8), "key": (2, 4, 5, 8), "value": (2, 4, 5, 8), "rel_k": (5, 8), "rel_v": (5, 8)}
META = torch.device("meta")
# what an error calls things that look like numbers, bools or tensors
NUMPY = {"numpy.float32": np.float32(1), "numpy.int64": np.int64(1), "numpy.bool": np.bool_(True)}
FOREIGN = NUMPY | {"numpy.ndarray": np.zeros((5, 5)), "fractions.Fraction": Fraction(1, 2)}


def arguments(**changes) -> dict:
    """Two sentences of five tokens, four heads of width 8, k = 2; with changes."""
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()} | changes


def integers(*numbers: int, **options) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, **options)


def kinds_of_tensors() -> Iterator[Refusal]:
    """No tensor; a tensor of another layout, dtype or device."""
    for name, shape in SHAPES.items():
        or_none = " or None" if name.startswith("rel_") else ""
        no_tensors = {"list": [1.0], "int": 3, "bool": True, "str": "x"} | FOREIGN
        no_tensors |= {} if or_none else {"NoneType": None}
        for kind, x in no_tensors.items():
            yield (
                kind,
                {name: x},
                TypeError,
                f"{name} must be a tensor{or_none}; got {kind}. Make it a tensor.",
            )
        sparse = torch.zeros(shape).to_sparse()
        jagged = torch.nested.nested_tensor([torch.zeros(5, 8), torch.zeros(3, 8)], layout=torch.jagged)
        for x in (sparse, jagged):
            yield (
                str(x.layout),
                {name: x},
                TypeError,
                f"{name} must be a dense tensor; got layout {x.layout}. "
                "Pad it, and give key_lengths if it is ragged.",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nested tensors of this layout are a prototype
            nested = torch.nested.nested_tensor([torch.zeros(5, 8), torch.zeros(3, 8)])
        told = (
            f"{name} must be a dense tensor; got a nested one. Pad it, and give key_lengths if it is ragged."
        )
        yield "nested", {name: nested}, TypeError, told
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
            yield (
                str(dtype),
                {name: torch.zeros(shape).to(dtype)},
                TypeError,
                f"{name} must be float64, float32, bfloat16 or float16; got {dtype}. Convert it with .to().",
            )
        if name != "query":
            told = f"{name} must be on the device of query = cpu; got meta. Move it with .to()."
            yield "device", {name: torch.zeros(shape, device=META)}, ValueError, told
    for name in ("key", "value"):
        for dtype in (torch.float64, torch.float16):
            yield (
                f"{dtype} beside float32",
                {name: torch.zeros(SHAPES[name], dtype=dtype)},
                TypeError,
                f"{name} must have the dtype of query = torch.float32; got {dtype}. "
                "Convert it with .to(), or use autocast, which converts all but float64.",
            )


def shapes_of_tensors() -> Iterator[Refusal]:
    """Ranks, and sizes that disagree."""
    for name, d in (("query", None), ("key", None), ("value", None), ("rel_k", "d_k"), ("rel_v", "d_v")):
        for shape in ((), (8,), (5, 8), (4, 5, 8), (1, 4, 5, 8), (1, 2, 4, 5, 8)):
            if len(shape) in ((4,) if d is None else (2, 3)):
                continue
            rule, advice = (
                (
                    "have 4 dimensions, [batch, heads, length, dim]",
                    "Split the heads, and add a batch of one if there is none.",
                )
                if d is None
                else (f"be [labels, {d}] or [heads, labels, {d}]", "Leave out the batch.")
            )
            told = f"{name} must {rule}; got {list(shape)}. {advice}"
            yield f"rank {len(shape)}", {name: torch.zeros(shape)}, ValueError, told

    heads = "Check how the heads are split."
    wide = "Tables are as wide as one head."
    odd = "must have an odd number of rows, 2 * k + 1, when max_distance is None;"
    for changes, told in (
        ({"key": (1, 4, 5, 8)}, "key must have the batch of query = 2; got 1. Expand it."),
        ({"value": (3, 4, 5, 8)}, "value must have the batch of query = 2; got 3. Expand it."),
        ({"key": (2, 4, 5, 7)}, "key must have the width d_k of query = 8; got 7. Check the projections."),
        (
            {"query": (2, 4, 5, 0), "key": (2, 4, 5, 0), "rel_k": None},
            "query must have a width d_k of at least 1; got 0. Check the projections.",
        ),
        ({"value": (2, 2, 5, 8)}, f"value must have the heads of key = 4; got 2. {heads}"),
        ({"key": (2, 2, 5, 8)}, f"value must have the heads of key = 2; got 4. {heads}"),
        (
            {"value": (2, 4, 6, 8)},
            "value must have the length of key = 5; got 6. Each key stands for one value.",
        ),
        *(
            (
                {"query": (2, of_query, 5, 8), "key": (2, of_key, 5, 8), "value": (2, of_key, 5, 8)},
                f"key must have a number of heads that divides the heads of query = {of_query}; "
                f"got {of_key}. {heads}",
            )
            for of_query, of_key in ((4, 3), (4, 8), (4, 0), (0, 4), (0, 0))
        ),
        ({"rel_k": (5, 32)}, f"rel_k must have the width d_k of query = 8; got 32. {wide}"),
        ({"rel_v": (5, 32)}, f"rel_v must have the width d_v of value = 8; got 32. {wide}"),
        ({"rel_k": (5, 0)}, f"rel_k must have the width d_k of query = 8; got 0. {wide}"),
        *(
            (
                {f"rel_{x}": (number, 5, 8)},
                f"rel_{x} must have one table for each head of query = 4; got {number}. "
                f"Give [labels, d_{x}] to share one table.",
            )
            for x in "kv"
            for number in (1, 2)
        ),
        ({"rel_k": (0, 8)}, "rel_k must have at least 1 row; got 0. Give None for no table."),
        ({"rel_v": (0, 8)}, "rel_v must have at least 1 row; got 0. Give None for no table."),
        ({"rel_k": (4, 8)}, f"rel_k {odd} got 4. Give max_distance=(left, right)."),
        ({"rel_k": None, "rel_v": (4, 8)}, f"rel_v {odd} got 4. Give max_distance=(left, right)."),
        (
            {"rel_v": (7, 8)},
            "rel_v must have as many rows as rel_k = 5; got 7. Both tables count the same distances.",
        ),
        *(
            (
                {"query": (2, 4, n, 8)},
                f"query_start must be given unless query and key have one length; got lengths {n} and 5. "
                "Give the position of the first query among the keys. "
                "Cross-attention has no relative positions.",
            )
            for n in (0, 1, 3, 6)
        ),
    ):
        tensors = {name: None if shape is None else torch.zeros(shape) for name, shape in changes.items()}
        yield ", ".join(f"{name} {shape}" for name, shape in changes.items()), tensors, ValueError, told


def distances() -> Iterator[Refusal]:
    """What counts tokens: max_distance, query_start, key_lengths."""
    for x in (1.0, "2", True, (2,), (2, 2, 2), (2, 2.0), (True, 2), {2: 2}, torch.tensor(2), math.inf):
        yield (
            repr(x),
            {"max_distance": x},
            TypeError,
            f"max_distance must be None, an integer k, or two integers (left, right); got {x!r}. "
            "Give one of these.",
        )
    for x in (-1, (2, -1), (-3, 7)):
        yield (
            repr(x),
            {"max_distance": x},
            ValueError,
            f"max_distance must be at least 0; got {x!r}. "
            "It counts tokens: left before the query, right after it.",
        )
    for x, rows in ((5, 11), (0, 1), ((5, 5), 11), ((4, 1), 6), (2**70, 2**71 + 1)):
        told = f"must have left + right + 1 = {rows} rows; got 5. Check max_distance."
        yield repr(x), {"max_distance": x}, ValueError, f"rel_k {told}"
        yield f"{x!r}, no rel_k", {"max_distance": x, "rel_k": None}, ValueError, f"rel_v {told}"
    position = "It is the position of the first query among the keys."
    no_integers = {"float": math.nan, "bool": True, "str": "1", "list": [0, 0], "tuple": (0, 0)} | FOREIGN
    for kind, x in no_integers.items():
        told = f"query_start must be an integer or an integer tensor [batch]; got {kind}. {position}"
        yield kind, {"query_start": x}, TypeError, told
        told = f"key_lengths must be an integer tensor [batch] or None; got {kind}. Make it a tensor."
        yield kind, {"key_lengths": x}, TypeError, told
    for x in (2**62 + 1, -(2**62) - 1, 2**70, -(2**63)):
        told = f"query_start must be between -2**62 and 2**62; got {x}. {position}"
        yield repr(x), {"query_start": x}, ValueError, told
        if -(2**63) <= x < 2**63:
            yield f"0 and {x}", {"query_start": integers(0, x)}, ValueError, told
    for name in ("query_start", "key_lengths"):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            told = f"{name} must be a tensor of integers; got {dtype}. Convert it with .long()."
            yield str(dtype), {name: torch.zeros(2, dtype=dtype)}, TypeError, told
        told = f"{name} must be a dense tensor; got layout torch.sparse_coo. Convert it with .to_dense()."
        yield "sparse", {name: integers(1, 1).to_sparse()}, TypeError, told
        for x in (torch.tensor(5), integers(5), integers(0, 0, 0), integers(0, 0)[:, None]):
            told = f"{name} must be [batch] = [2]; got {list(x.shape)}. Give one number for each sequence."
            yield str(list(x.shape)), {name: x}, ValueError, told
        told = f"{name} must be on the device of query = cpu; got meta. Move it with .to()."
        yield "device", {name: integers(0, 0, device=META)}, ValueError, told
    for first, second, wrong in ((5, 6, 6), (-1, 5, -1), (9, -9, 9), (0, -(2**63), -(2**63))):
        yield (
            f"{first}, {second}",
            {"key_lengths": integers(first, second)},
            ValueError,
            f"key_lengths must be between 0 and the length of key = 5; got {wrong}. "
            "It counts the keys that exist.",
        )


def masks() -> Iterator[Refusal]:
    """attn_mask."""
    for kind, x in ({"list": [[True]], "bool": True, "float": 1.0, "str": "causal"} | FOREIGN).items():
        told = f"attn_mask must be a tensor or None; got {kind}. Make it a tensor."
        yield kind, {"attn_mask": x}, TypeError, told
    told = "attn_mask must be a dense tensor; got layout torch.sparse_coo. Convert it with .to_dense()."
    yield "sparse", {"attn_mask": torch.ones(5, 5, dtype=torch.bool).to_sparse()}, TypeError, told
    for dtype in (torch.int64, torch.uint8, torch.complex64):
        yield (
            str(dtype),
            {"attn_mask": torch.ones(5, 5, dtype=dtype)},
            TypeError,
            f"attn_mask must be bool (True = may attend) or float (added to the logits); got {dtype}. "
            "Give mask != 0 where 1 = may attend, and mask == 0 where 1 = hidden.",
        )
    told = "attn_mask must be on the device of query = cpu; got meta. Move it with .to()."
    yield "device", {"attn_mask": torch.zeros(5, 5, device=META)}, ValueError, told
    for shape in (
        *((4,), (0,), (2, 5), (5, 6), (0, 5), (2, 5, 5), (3, 1, 5, 5), (2, 3, 5, 5), (2, 1, 6, 5)),
        *((2, 1, 5, 0), (1, 2, 4, 5, 5), (1, 1, 1, 1, 1)),
    ):
        yield (
            str(shape),
            {"attn_mask": torch.zeros(shape)},
            ValueError,
            "attn_mask must be broadcastable to [batch, heads, query, key] = [2, 4, 5, 5]; "
            f"got {list(shape)}. Unsqueeze the dimensions that it is shared over: "
            "of [batch, query, key] give attn_mask[:, None].",
        )


def numbers_and_flags() -> Iterator[Refusal]:
    """is_causal, return_lse, dropout_p, scale."""
    no_flags = {"int": 1, "NoneType": None, "str": "True", "float": 1.0, "list": [True]}
    for kind, x in (no_flags | FOREIGN | {"torch.Tensor": torch.tensor(True)}).items():
        for name in ("is_causal", "return_lse"):
            yield kind, {name: x}, TypeError, f"{name} must be True or False; got {kind}. Give a bool."
    no_numbers = {"str": "0.1", "bool": True, "list": [0.1], "complex": 1j, "torch.Tensor": torch.tensor(0.1)}
    for kind, x in (no_numbers | FOREIGN | {"NoneType": None}).items():
        told = f"dropout_p must be a number; got {kind}. It is a probability."
        yield kind, {"dropout_p": x}, TypeError, told
    for x in (1.5, 2, -0.1, math.nan, math.inf, -math.inf):
        told = f"dropout_p must be between 0 and 1; got {x}. It is a probability."
        yield repr(x), {"dropout_p": x}, ValueError, told
    for kind, x in (no_numbers | FOREIGN).items():
        told = f"scale must be a number or None; got {kind}. Multiply query by what is learned."
        yield kind, {"scale": x}, TypeError, told
    for x in (math.nan, math.inf, -math.inf, 10**400):
        told = f"scale must be finite; got {x}. Leave it out for 1 / sqrt(d_k)."
        yield repr(x)[:20], {"scale": x}, ValueError, told


SOURCES: tuple[Callable[[], Iterator[Refusal]], ...] = (
    kinds_of_tensors,
    shapes_of_tensors,
    distances,
    masks,
    numbers_and_flags,
)
REFUSED = [refusal for source in SOURCES for refusal in source()]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [refusal[1:] for refusal in REFUSED],
    ids=[f"{'+'.join(changes)}: {what}" for what, changes, _, _ in REFUSED],
)
def test_what_is_wrong_is_refused_by_name_and_number(
    changes: dict, error: type[Exception], message: str
) -> None:
    calls = [relative_attention, explain_backends]
    if not changes.keys() & {"dropout_p", "return_lse"}:
        calls.append(decompose)
    for call in calls:
        with pytest.raises(error) as raised:
            call(**arguments(**changes))
        assert str(raised.value) == message


def test_every_argument_is_refused_in_some_way_of_its_own() -> None:
    named = {message.split()[0] for _, _, _, message in REFUSED}
    every = set(relative_attention.__kwdefaults__) - {"backend"} | set(SHAPES)
    assert named == every


# labels of pairs


def related(**changes) -> dict:
    """What `relation_attention` takes: five labels, no distances; with changes."""
    return arguments() | {"relations": integers(*[0] * 25).view(5, 5)} | changes


def wrong_labels() -> Iterator[Refusal]:
    """Tensors that are no labels, and labels that no row has."""
    for kind, x in ({"list": [[0]], "int": 3, "NoneType": None, "str": "x"} | FOREIGN).items():
        told = (
            f"relations must be a tensor of integers; got {kind}. "
            "Make it a tensor; `Relations` have theirs as .labels."
        )
        yield kind, {"relations": x}, TypeError, told
    told = "relations must be a dense tensor; got layout torch.sparse_coo. Convert it with .to_dense()."
    yield "sparse", {"relations": torch.ones(5, 5, dtype=torch.int64).to_sparse()}, TypeError, told
    for dtype in (torch.float32, torch.bool, torch.complex64):
        yield (
            str(dtype),
            {"relations": torch.zeros(5, 5, dtype=dtype)},
            TypeError,
            f"relations must be a tensor of integers, labels from 0 and -1 for none; got {dtype}. "
            "Convert it with .long().",
        )
    told = "relations must be on the device of query = cpu; got meta. Move it with .to()."
    yield "device", {"relations": torch.zeros(5, 5, dtype=torch.int64, device=META)}, ValueError, told
    for shape in ((2, 5), (4,), (2, 5, 5), (3, 1, 5, 5), (2, 1, 5, 6), (1, 2, 4, 5, 5)):
        yield (
            str(shape),
            {"relations": torch.zeros(shape, dtype=torch.int64)},
            ValueError,
            "relations must be broadcastable to [batch, heads, query, key] = [2, 4, 5, 5]; "
            f"got {list(shape)}. Unsqueeze the dimensions that it is shared over: "
            "of [batch, query, key] give relations[:, None].",
        )
    rule = "relations must be at least -1, which is no relation, and at most 4, the last row of the tables"
    for dtype in (torch.int64, torch.int8):
        for wrong in (-2, 5, 127, -128):
            labels = torch.full((1, 5), -1, dtype=dtype)
            labels[0, 3] = wrong
            told = f"{rule}; got {wrong}. Check how pairs are labelled."
            yield f"{wrong} in {dtype}", {"relations": labels}, ValueError, told
    told = "rel_v must have as many rows as rel_k = 5; got 7. Both tables have one row for each label."
    yield "rows", {"rel_v": torch.zeros(7, 8)}, ValueError, told


LABELS_REFUSED = list(wrong_labels())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [refusal[1:] for refusal in LABELS_REFUSED],
    ids=[f"{'+'.join(changes)}: {what}" for what, changes, _, _ in LABELS_REFUSED],
)
def test_labels_that_are_wrong_are_refused_by_name_and_number(
    changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        relation_attention(**related(**changes))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        refusal[1:]
        for source in (kinds_of_tensors, shapes_of_tensors, masks, numbers_and_flags)
        for refusal in source()
        if "is_causal" not in refusal[1]
        # what relation_attention has no argument for, or says of labels in other words
        and not any(x in refusal[3] for x in ("query_start", "max_distance", "same distances"))
    ],
)
def test_what_both_functions_take_is_refused_by_both_in_the_same_words(
    changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        relation_attention(**related(**changes))
    assert str(raised.value) == message
