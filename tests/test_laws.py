"""Laws of attention for shapes, cuts and orders that nobody chose; every backend keeps them.

Where one side of a law needs a dense mask, the reference computes that side, so that a backend without masks
is held to the law as well.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.cases import Case, attend, make
from conformance.skips import each_backend
from relpos import relation_attention
from relpos.backends.triton import backend as triton

BOTH = ("key", "value")

# what equals the reference for any shape keeps its laws; the interpreter of triton takes minutes for examples
backends = pytest.mark.parametrize("backend", each_backend(*["triton"] * triton.IS_INTERPRETED))
any_settings = settings(max_examples=40, deadline=None, database=None, derandomize=True)


@st.composite
def any_call(draw, *, most: int = 9, **fixed) -> dict:
    """Arguments of attention without a mask: any shapes, sides, tables and start; causal or not."""
    n, m = draw(st.integers(0, most)), draw(st.integers(1, most))
    key_heads = draw(st.integers(1, 2))
    given_case = {
        "num_queries": n,
        "num_keys": m,
        "heads": key_heads * draw(st.integers(1, 2)),
        "key_heads": key_heads,
        "d_k": draw(st.integers(1, 4)),
        "d_v": draw(st.integers(1, 4)),
        "left": draw(st.integers(0, most + 2)),
        "right": draw(st.integers(0, most + 2)),
        "tables": draw(st.sampled_from(["both", "keys", "values", "neither"])),
        "is_per_head": draw(st.booleans()),
        "query_start": draw(
            st.one_of(st.integers(-4, most + 4), st.tuples(*[st.integers(-4, most + 4)] * 2))
        ),
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    made = make(Case("any", **given_case | fixed))
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in made.items()}


def assert_same(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-10)


def sliced(arguments: dict, first: int, end: int) -> dict:
    """The keys and values from `first` to before `end`, with queries that stand where they stood."""
    start = arguments["query_start"]
    return (
        arguments | {name: arguments[name][:, :, first:end] for name in BOTH} | {"query_start": start - first}
    )


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both, out of (out, lse) over the keys of each."""
    lse = torch.logaddexp(one[1], other[1])
    shares = [torch.exp(x[1] - lse).masked_fill(lse == -torch.inf, 0.0)[..., None] for x in (one, other)]
    return shares[0] * one[0] + shares[1] * other[0], lse


@backends
@any_settings
@given(arguments=any_call(), draw=st.data())
def test_parts_of_the_keys_merge_to_the_whole_in_any_grouping(backend: str, arguments: dict, draw) -> None:
    m = arguments["key"].shape[2]
    cuts = sorted(draw.draw(st.sets(st.integers(0, m), max_size=4)) | {0, m})
    parts = [attend(backend, sliced(arguments, *pair)) for pair in itertools.pairwise(cuts)]
    parts = draw.draw(st.permutations(parts))
    truth = attend(backend, arguments)
    assert_same(functools.reduce(merged, parts), truth)
    assert_same(functools.reduce(lambda x, y: merged(y, x), reversed(parts)), truth)
    while len(parts) > 1:
        i = draw.draw(st.integers(0, len(parts) - 2))
        parts[i : i + 2] = [merged(*parts[i : i + 2])]
    assert_same(parts[0], truth)


@backends
@any_settings
@given(arguments=any_call(), draw=st.data())
def test_chunks_of_the_queries_equal_one_pass_for_any_cut(backend: str, arguments: dict, draw) -> None:
    n = arguments["query"].shape[2]
    cuts = sorted(draw.draw(st.sets(st.integers(0, n), max_size=4)) | {0, n})
    chunks = [
        attend(
            backend,
            arguments
            | {"query": arguments["query"][:, :, i:end], "query_start": arguments["query_start"] + i},
        )
        for i, end in itertools.pairwise([0, *cuts[1:]] if n else [0, 0])
    ]
    found = tuple(torch.cat(x, 2) for x in zip(*chunks, strict=True))
    assert_same(found, attend(backend, arguments))


@backends
@any_settings
@given(arguments=any_call(num_queries=9, num_keys=9, query_start=0, is_causal=True), draw=st.data())
def test_chunks_over_a_cache_equal_one_causal_pass_for_any_cut(backend: str, arguments: dict, draw) -> None:
    cuts = sorted(draw.draw(st.sets(st.integers(1, 8))) | {0, 9})
    # a static cache has its full length at once, and lengths say what it holds
    is_static = draw.draw(st.booleans())
    chunks = []
    for i, end in itertools.pairwise(cuts):
        held = {"query": arguments["query"][:, :, i:end], "query_start": i}
        if is_static:
            held["key_lengths"] = torch.tensor([end, end])
            held |= {name: arguments[name].clone() for name in BOTH}
            for name in BOTH:
                held[name][:, :, end:] = torch.nan
        else:
            held |= {name: arguments[name][:, :, :end] for name in BOTH}
        chunks.append(attend(backend, arguments | held))
    assert_same(tuple(torch.cat(x, 2) for x in zip(*chunks, strict=True)), attend(backend, arguments))


@backends
@any_settings
@given(arguments=any_call(), draw=st.data())
def test_key_lengths_equal_keys_that_were_never_there(backend: str, arguments: dict, draw) -> None:
    m = arguments["key"].shape[2]
    lengths = draw.draw(st.tuples(st.integers(0, m), st.integers(0, m)))
    found = attend(backend, arguments | {"key_lengths": torch.tensor(lengths)})
    for s, length in enumerate(lengths):
        alone = sliced(arguments, 0, length)
        alone |= {name: alone[name][s : s + 1] for name in ("query", *BOTH)}
        start = alone["query_start"]
        alone["query_start"] = start[s : s + 1] if isinstance(start, Tensor) else start
        assert_same(tuple(x[s : s + 1] for x in found), attend(backend, alone))


@backends
@any_settings
@given(arguments=any_call(is_causal=True))
def test_causal_equals_its_mask_written_out(backend: str, arguments: dict) -> None:
    n, m = arguments["query"].shape[2], arguments["key"].shape[2]
    start = torch.as_tensor(arguments["query_start"]).reshape(-1, 1, 1, 1)
    mask = torch.arange(m) <= start + torch.arange(n)[:, None]
    truth = attend("reference", arguments | {"is_causal": False, "attn_mask": mask})
    assert_same(attend(backend, arguments), truth)


@backends
@any_settings
@given(arguments=any_call(), before=st.integers(1, 5))
def test_hidden_keys_before_the_first_shift_the_start_and_nothing_else(
    backend: str, arguments: dict, before: int
) -> None:
    b, h, m, _ = arguments["key"].shape
    more = {name: torch.randn(b, h, before, arguments[name].shape[3]).double() for name in BOTH}
    longer = {name: torch.cat([more[name], arguments[name]], 2) for name in BOTH}
    longer["query_start"] = arguments["query_start"] + before
    truth = attend("reference", arguments | longer | {"attn_mask": torch.arange(before + m) >= before})
    assert_same(attend(backend, arguments), truth)


@backends
@any_settings
@given(arguments=any_call(num_queries=6, num_keys=6, tables="neither", is_causal=False), draw=st.data())
def test_without_tables_the_order_of_the_keys_is_nothing(backend: str, arguments: dict, draw) -> None:
    order = draw.draw(st.permutations(range(6)))
    shuffled = {name: arguments[name][:, :, order] for name in BOTH}
    assert_same(attend(backend, arguments | shuffled), attend(backend, arguments))


@backends
@any_settings
@given(arguments=any_call(), draw=st.data())
def test_reversed_tokens_under_reversed_tables_give_the_reversed_output(
    backend: str, arguments: dict, draw
) -> None:
    n, m = arguments["query"].shape[2], arguments["key"].shape[2]
    arguments["is_causal"] = False
    left, right = arguments["max_distance"]
    mirrored = {name: arguments[name].flip(2) for name in ("query", *BOTH)}
    mirrored |= {
        name: None if arguments[name] is None else arguments[name].flip(-2) for name in ("rel_k", "rel_v")
    }
    # query i becomes n - 1 - i, key j becomes m - 1 - j, and every distance its opposite
    mirrored |= {"max_distance": (right, left), "query_start": m - n - arguments["query_start"]}
    found = attend(backend, arguments | mirrored)
    assert_same(tuple(x.flip(2) for x in found), attend(backend, arguments))


# labels of pairs


def related(backend: str, arguments: dict, **changes) -> tuple[Tensor, Tensor]:
    """(out, lse) under labels of pairs."""
    return relation_attention(**arguments | changes, return_lse=True, backend=backend)


@st.composite
def any_graph(draw) -> dict:
    """Arguments of attention under labels of pairs, which may be one matrix for all sequences and heads."""
    n, m, num_labels = draw(st.integers(0, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 5))
    made = draw(any_call(num_queries=n, num_keys=m, left=num_labels - 1, right=0, heads=2, key_heads=1))
    leading = draw(st.sampled_from([(), (1, 1), (2, 1), (1, 2), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    labels = torch.randint(-1, num_labels, (*leading, n, m), generator=generator)
    tensors = {name: made[name] for name in ("query", *BOTH, "rel_k", "rel_v")}
    return tensors | {"relations": labels}


# merged supports relative_attention only
takers_of_labels = pytest.mark.parametrize("backend", each_backend("merged"))


@takers_of_labels
@any_settings
@given(arguments=any_graph(), draw=st.data())
def test_permuted_keys_with_their_labels_change_nothing(backend: str, arguments: dict, draw) -> None:
    order = draw.draw(st.permutations(range(arguments["key"].shape[2])))
    shuffled = {name: arguments[name][:, :, order] for name in BOTH}
    shuffled["relations"] = arguments["relations"][..., order]
    assert_same(related(backend, arguments | shuffled), related(backend, arguments))


@takers_of_labels
@any_settings
@given(arguments=any_graph(), draw=st.data())
def test_a_permuted_graph_permutes_the_output(backend: str, arguments: dict, draw) -> None:
    n, m = arguments["query"].shape[2], arguments["key"].shape[2]
    rows, columns = draw.draw(st.permutations(range(n))), draw.draw(st.permutations(range(m)))
    shuffled = {name: arguments[name][:, :, columns] for name in BOTH}
    shuffled |= {"query": arguments["query"][:, :, rows]}
    shuffled |= {"relations": arguments["relations"][..., rows, :][..., columns]}
    truth = related(backend, arguments)
    assert_same(related(backend, arguments | shuffled), (truth[0][:, :, rows], truth[1][:, :, rows]))


@takers_of_labels
@any_settings
@given(arguments=any_graph(), draw=st.data())
def test_renamed_labels_with_their_rows_change_nothing(backend: str, arguments: dict, draw) -> None:
    tables = {name: arguments[name] for name in ("rel_k", "rel_v") if arguments[name] is not None}
    num_labels = max((x.shape[-2] for x in tables.values()), default=5)
    order = torch.tensor(draw.draw(st.permutations(range(num_labels))))
    named = {name: table[..., order, :] for name, table in tables.items()}
    # row order[i] of the old tables is row i of the new ones; the last number is what -1 becomes
    named["relations"] = torch.cat([order.argsort(), torch.tensor([-1])])[arguments["relations"]]
    assert_same(related(backend, arguments | named), related(backend, arguments))


@takers_of_labels
@any_settings
@given(arguments=any_graph())
def test_no_relation_is_a_row_of_zeros(backend: str, arguments: dict) -> None:
    tables = {name: arguments[name] for name in ("rel_k", "rel_v") if arguments[name] is not None}
    longer = {name: torch.nn.functional.pad(table, (0, 0, 0, 1)) for name, table in tables.items()}
    labels = arguments["relations"]
    num_labels = max((x.shape[-2] for x in tables.values()), default=0)
    longer["relations"] = labels.masked_fill(labels < 0, num_labels)
    assert_same(related(backend, arguments | longer), related(backend, arguments))


@takers_of_labels
@any_settings
@given(arguments=any_call(is_causal=False))
def test_clipped_distances_as_labels_are_relative_attention(backend: str, arguments: dict) -> None:
    truth = attend(backend, arguments)
    left, right = arguments.pop("max_distance")
    start = torch.as_tensor(arguments.pop("query_start")).reshape(-1, 1, 1, 1)
    arguments.pop("is_causal")
    i, j = torch.arange(arguments["query"].shape[2])[:, None], torch.arange(arguments["key"].shape[2])
    labels = (j - (start + i)).clamp(-left, right) + left
    assert_same(related(backend, arguments, relations=labels), truth)
