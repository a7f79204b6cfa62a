"""The door: what it chooses, what it leaves alone, and what it exports. What it refuses: test_refusals.py."""

import math
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import relpos
from relpos import _dispatch, explain_backends, relation_attention, relative_attention
from relpos.backends import dense
from relpos.backends.backend import Backend


def arguments(**changes) -> dict:
    """Two sentences of five tokens, four heads of width 8, k = 2; with changes."""
    torch.manual_seed(0)
    plain = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")}
    return plain | {name: torch.randn(5, 8) for name in ("rel_k", "rel_v")} | changes


def test_lengths_out_of_range_are_cut_where_values_are_not_looked_at() -> None:
    given = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(relative_attention, backend="eager", fullgraph=True)
    found = compiled(**given, key_lengths=torch.tensor([9, -3]))
    torch.testing.assert_close(found, relative_attention(**given, key_lengths=torch.tensor([5, 0])))


def test_the_result_has_the_dtype_of_query_and_lse_only_where_asked() -> None:
    out = relative_attention(**arguments())
    assert isinstance(out, torch.Tensor)
    assert out.shape == (2, 4, 5, 8)
    same, lse = relative_attention(**arguments(), return_lse=True)
    assert same.equal(out)
    assert lse.shape == (2, 4, 5)


def test_the_first_backend_that_fits_is_chosen_and_never_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    table = (
        Backend("picky", lambda inputs: ["it is Monday", "query is small"], dense.run),
        Backend("good", lambda inputs: [], lambda inputs: ran.append("good") or dense.run(inputs)),
        Backend("late", lambda inputs: [], lambda inputs: ran.append("late") or dense.run(inputs)),
    )
    monkeypatch.setattr(_dispatch, "BACKENDS", table)
    relative_attention(**arguments())
    assert ran == ["good"]
    relative_attention(**arguments(), backend="late")
    assert ran == ["good", "late"]
    explained = explain_backends(**arguments())
    assert explained == {"picky": ["it is Monday", "query is small"], "good": [], "late": []}
    assert explained.chosen == "good"
    assert str(explained) == "picky: it is Monday; query is small\ngood: chosen\nlate: fits, but comes later"


def test_a_forced_backend_fails_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = Backend("picky", lambda inputs: ["it is Monday", "query is small"], dense.run)
    other = Backend("other", lambda inputs: ["no device"], dense.run)
    monkeypatch.setattr(_dispatch, "BACKENDS", (picky, other))
    with pytest.raises(NotImplementedError) as raised:
        relative_attention(**arguments(), backend="picky")
    assert (
        str(raised.value) == "backend 'picky' cannot run this attention:\npicky: it is Monday; query is small"
    )
    with pytest.raises(NotImplementedError) as raised:
        relative_attention(**arguments())
    assert str(raised.value) == (
        "no backend can run this attention:\npicky: it is Monday; query is small\nother: no device"
    )
    assert explain_backends(**arguments()).chosen is None


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    known = ", ".join([*explain_backends(**arguments()), "reference"])
    with pytest.raises(ValueError, match="backend must be") as raised:
        relative_attention(**arguments(), backend="fast")
    assert str(raised.value) == (
        f"backend must be None or one of {known}; got 'fast'. Leave it out to let relpos choose."
    )
    assert "reference" not in explain_backends(**arguments())


def test_arguments_are_left_as_they_were() -> None:
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.rand(2, 1, 5, 5) < 0.5, -math.inf)
    mask[0, 0, 0] = -math.inf
    given = arguments(attn_mask=mask, key_lengths=torch.tensor([5, 2]), query_start=torch.tensor([0, 1]))
    copies = {name: x.clone() for name, x in given.items()}
    relative_attention(**given, is_causal=True)
    for name, x in given.items():
        assert x.equal(copies[name]), name


def test_under_autocast_it_takes_what_torchs_attention_takes(backend: str) -> None:
    given = arguments()
    names = ("query", "key", "value")
    low = given | {name: given[name].bfloat16() for name in names}
    true = relative_attention(**low, backend=backend)
    mixed = [given | {name: low[name] for name in chosen} for chosen in ((), names[:1], names[1:], names)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for some in mixed:
            assert scaled_dot_product_attention(*(some[name] for name in names)).dtype == torch.bfloat16
            out = relative_attention(**some, backend=backend)
            assert out.dtype == torch.bfloat16
            assert out.equal(true)
        with torch.autocast("cpu", enabled=False):
            assert relative_attention(**given, backend=backend).dtype == torch.float32
        double = {name: x.double() for name, x in given.items()}
        assert relative_attention(**double, backend=backend).dtype == torch.float64
        with pytest.raises(
            TypeError, match=r"^key must have the dtype of query = torch.float64; got torch.bfl"
        ):
            relative_attention(**given | {"query": double["query"]}, backend=backend)
    with torch.autocast("cpu", dtype=torch.float16):
        assert relative_attention(**given, backend=backend).dtype == torch.float16


def test_under_autocast_tables_are_not_rounded_and_gradients_have_their_dtypes() -> None:
    given = {name: x.requires_grad_() for name, x in arguments().items()}
    exact = {name: given[name].bfloat16() for name in ("query", "key", "value")}
    true = relative_attention(**given | exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = relative_attention(**given)
    assert out.equal(true)
    out.float().square().sum().backward()
    assert {x.grad.dtype for x in given.values()} == {torch.float32}


def test_labels_under_autocast_and_a_compiled_graph_are_cast_too() -> None:
    torch._dynamo.reset()
    given, relations = arguments(), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    tensors = [given[name] for name in ("query", "key", "value")]
    low = relation_attention(*(x.bfloat16() for x in tensors), relations, given["rel_k"], None)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return relation_attention(*x, relations, given["rel_k"], None)

    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        assert function(*tensors).equal(low)
    torch._dynamo.reset()


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_export_runs_at_lengths_it_was_not_traced_with(is_strict: bool) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rel_k = torch.nn.Parameter(torch.randn(5, 8))
            self.rel_v = torch.nn.Parameter(torch.randn(4, 5, 8))

        def forward(self, query, key, lengths):
            return relative_attention(
                query,
                key,
                key,
                self.rel_k,
                self.rel_v,
                key_lengths=lengths,
                query_start=key.shape[2] - query.shape[2],
                is_causal=True,
            )

    torch.manual_seed(0)
    attention = Attention()
    b, n, m = torch.export.Dim("b"), torch.export.Dim("n"), torch.export.Dim("m")
    exported = torch.export.export(
        attention,
        (torch.randn(3, 4, 3, 8), torch.randn(3, 2, 7, 8), torch.tensor([7, 5, 2])),
        dynamic_shapes=({0: b, 2: n}, {0: b, 2: m}, {0: b}),
        strict=is_strict,
    ).module()
    for n, m in ((1, 9), (6, 6), (3, 40)):
        inputs = (torch.randn(4, 4, n, 8), torch.randn(4, 2, m, 8), torch.tensor([m, 1, 0, m]))
        torch.testing.assert_close(exported(*inputs), attention(*inputs))


def test_importing_relpos_imports_torch_alone() -> None:
    heavier = [
        "transformers",
        "datasets",
        "tokenizers",
        "sacrebleu",
        "pydantic",
        "typer",
        "rich",
        "matplotlib",
    ]
    code = f"import sys, relpos; print([x for x in {heavier} if x in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_version_is_that_of_the_distribution() -> None:
    assert relpos.__version__ == version("relpos")


def test_key_lengths_of_a_small_dtype_serve_long_keys() -> None:
    x = torch.randn(2, 2, 300, 4)
    table = torch.randn(5, 4)
    lengths = torch.tensor([5, 50])
    expected = relpos.relative_attention(x, x, x, table, None, key_lengths=lengths)
    for dtype in (torch.int8, torch.uint8):
        out = relpos.relative_attention(x, x, x, table, None, key_lengths=lengths.to(dtype))
        assert torch.equal(out, expected)


@pytest.mark.usefixtures("without_kernel")
def test_backends_are_explained_for_labels_too() -> None:
    x, table = torch.zeros(1, 1, 4, 8), torch.zeros(3, 8)
    labels = torch.zeros(4, 4, dtype=torch.int64)
    explained = explain_backends(x, x, x, table, None, relations=labels)
    assert explained["dense"] == []
    assert "relation_attention" in explained["merged"][0]
    assert explained.chosen == "dense"
    for wrong in ({"max_distance": 1}, {"query_start": 0}, {"is_causal": True}):
        with pytest.raises(ValueError, match="must be left out beside relations"):
            explain_backends(x, x, x, table, None, relations=labels, **wrong)


@pytest.mark.parametrize(("length", "chosen"), [(64, "dense"), (1024, "merged")])
@pytest.mark.usefixtures("without_kernel")
def test_a_backend_that_fits_leaves_sizes_to_a_faster_one(length: int, chosen: str) -> None:
    x, table = torch.zeros(1, 1, 1, 1).expand(1, 8, length, 4), torch.zeros(3, 4)
    explained = explain_backends(x, x, x, table, table)
    assert [explained[x] for x in ("cpu", "merged", "dense")] == [["was not built"], [], []]
    assert explained.chosen == chosen
    _, of_cpu, *lines = str(explained).splitlines()
    assert of_cpu == "cpu: was not built"
    if chosen == "dense":
        assert lines == ["merged: fits, but is slower with fewer than 256 keys", "dense: chosen"]
    else:
        assert lines == ["merged: chosen", "dense: fits, but comes later"]


def test_the_first_that_fits_is_taken_where_each_would_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shy(name: str) -> Backend:
        return Backend(name, lambda _: [], lambda inputs: (inputs.query, None), lambda _: "is shy")

    monkeypatch.setattr(_dispatch, "BACKENDS", (shy("one"), shy("two")))
    x = torch.ones(1, 1, 4, 8)
    assert explain_backends(x, x, x, None, None).chosen == "one"
    assert relative_attention(x, x, x, None, None) is x
