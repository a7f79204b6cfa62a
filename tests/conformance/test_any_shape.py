"""Every backend against the reference for shapes that nobody chose."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import Case, attend, make, outcome
from conformance.skips import each_backend

backends = pytest.mark.parametrize("backend", each_backend())


@st.composite
def any_case(draw) -> Case:
    """Shapes, sides, tables and masks in any combination that the contract allows."""
    n, m = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    batch, key_heads = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    start = draw(st.one_of(st.integers(-12, 12), st.tuples(*[st.integers(-12, 12)] * batch)))
    if draw(st.booleans()):
        start, m = None, n
    relations = draw(st.sampled_from([None, None, None, "pairs", "batch", "heads", "none"]))
    return Case(
        "any",
        num_queries=n,
        num_keys=m,
        batch=batch,
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        d_k=draw(st.integers(1, 5)),
        d_v=draw(st.integers(1, 5)),
        left=draw(st.integers(0, 12)),
        right=draw(st.integers(0, 12)),
        tables=draw(st.sampled_from(["both", "keys", "values", "neither"])),
        is_per_head=draw(st.booleans()),
        query_start=start,
        relations=relations,
        mask=draw(st.sampled_from([None, "bool", "empty rows", "keys", "float inf"])),
        key_lengths=draw(st.one_of(st.none(), st.tuples(*[st.integers(0, m)] * batch))),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.5])),
        layout=draw(st.sampled_from(["contiguous", "transposed", "expanded", "strided"])),
    )


@backends
@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(case=any_case())
def test_any_shape_equals_the_reference(backend: str, case: Case) -> None:
    if backend == "merged":
        # it takes neither, and a skip would end all examples
        case = replace(case, mask=None, relations=None)
    arguments = make(case)
    found = outcome(*attend(backend, arguments), arguments)
    truth = outcome(*attend("reference", arguments), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
