"""The door: what it refuses and in which words, what it chooses, and what it leaves alone."""

import math
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import relpos
from relpos import _dispatch, explain_backends, relative_attention
from relpos.backends import dense
from relpos.backends._backend import Backend


def arguments(**changes) -> dict:
    """Two sentences of five tokens, four heads of width 8, k = 2; with changes."""
    torch.manual_seed(0)
    plain = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")}
    return plain | {name: torch.randn(5, 8) for name in ("rel_k", "rel_v")} | changes


def floats(*shape: int, **kwargs) -> torch.Tensor:
    return torch.zeros(*shape, **kwargs)


META = torch.device("meta")
ONE_A_SEQUENCE = "Give one number for each sequence."

REFUSED = [
    # kinds and dtypes
    ({"query": [1.0]}, TypeError, "query must be a tensor; got list. Make it a tensor."),
    ({"value": None}, TypeError, "value must be a tensor; got NoneType. Make it a tensor."),
    ({"rel_k": 3}, TypeError, "rel_k must be a tensor or None; got int. Make it a tensor."),
    (
        {"key": floats(2, 4, 5, 8).to_sparse()},
        TypeError,
        "key must be a dense tensor; got layout torch.sparse_coo. "
        "Pad it, and give key_lengths if it is ragged.",
    ),
    (
        {"query": torch.zeros(2, 4, 5, 8, dtype=torch.int64)},
        TypeError,
        "query must be float64, float32, bfloat16 or float16; got torch.int64. Convert it with .to().",
    ),
    (
        {"rel_v": floats(5, 8, dtype=torch.complex64)},
        TypeError,
        "rel_v must be float64, float32, bfloat16 or float16; got torch.complex64. Convert it with .to().",
    ),
    (
        {"key": floats(2, 4, 5, 8, dtype=torch.float16)},
        TypeError,
        "key must have the dtype of query = torch.float32; got torch.float16. "
        "Convert it with .to(), or use autocast.",
    ),
    (
        {"value": floats(2, 4, 5, 8, dtype=torch.float64)},
        TypeError,
        "value must have the dtype of query = torch.float32; got torch.float64. "
        "Convert it with .to(), or use autocast.",
    ),
    # devices
    (
        {"key": floats(2, 4, 5, 8, device=META)},
        ValueError,
        "key must be on the device of query = cpu; got meta. Move it with .to().",
    ),
    (
        {"rel_k": floats(5, 8, device=META)},
        ValueError,
        "rel_k must be on the device of query = cpu; got meta. Move it with .to().",
    ),
    (
        {"attn_mask": floats(5, 5, device=META)},
        ValueError,
        "attn_mask must be on the device of query = cpu; got meta. Move it with .to().",
    ),
    (
        {"key_lengths": torch.zeros(2, dtype=torch.int64, device=META)},
        ValueError,
        "key_lengths must be on the device of query = cpu; got meta. Move it with .to().",
    ),
    # shapes
    (
        {"query": floats(4, 5, 8)},
        ValueError,
        "query must have 4 dimensions, [batch, heads, length, dim]; got [4, 5, 8]. "
        "Split the heads, and add a batch of one if there is none.",
    ),
    ({"key": floats(1, 4, 5, 8)}, ValueError, "key must have the batch of query = 2; got 1. Expand it."),
    ({"value": floats(3, 4, 5, 8)}, ValueError, "value must have the batch of query = 2; got 3. Expand it."),
    (
        {"key": floats(2, 4, 5, 7)},
        ValueError,
        "key must have the width d_k of query = 8; got 7. Check the projections.",
    ),
    (
        {"query": floats(2, 4, 5, 0), "key": floats(2, 4, 5, 0), "rel_k": None},
        ValueError,
        "query must have a width d_k of at least 1; got 0. Check the projections.",
    ),
    (
        {"value": floats(2, 2, 5, 8)},
        ValueError,
        "value must have the heads of key = 4; got 2. Check how the heads are split.",
    ),
    (
        {"value": floats(2, 4, 6, 8)},
        ValueError,
        "value must have the length of key = 5; got 6. Each key stands for one value.",
    ),
    (
        {"key": floats(2, 3, 5, 8), "value": floats(2, 3, 5, 8)},
        ValueError,
        "key must have a number of heads that divides the heads of query = 4; got 3. "
        "Check how the heads are split.",
    ),
    (
        {"key": floats(2, 0, 5, 8), "value": floats(2, 0, 5, 8)},
        ValueError,
        "key must have a number of heads that divides the heads of query = 4; got 0. "
        "Check how the heads are split.",
    ),
    # tables
    (
        {"rel_k": floats(2, 4, 5, 8)},
        ValueError,
        "rel_k must be [labels, d_k] or [heads, labels, d_k]; got [2, 4, 5, 8]. Leave out the batch.",
    ),
    (
        {"rel_v": floats(2, 5, 8)},
        ValueError,
        "rel_v must have one table for each head of query = 4; got 2. Give [labels, d_v] to share one table.",
    ),
    (
        {"rel_k": floats(5, 32)},
        ValueError,
        "rel_k must have the width d_k of query = 8; got 32. Tables are as wide as one head.",
    ),
    (
        {"rel_v": floats(5, 32)},
        ValueError,
        "rel_v must have the width d_v of value = 8; got 32. Tables are as wide as one head.",
    ),
    ({"rel_v": floats(0, 8)}, ValueError, "rel_v must have at least 1 row; got 0. Give None for no table."),
    (
        {"max_distance": (5, 5)},
        ValueError,
        "rel_k must have left + right + 1 = 11 rows; got 5. Check max_distance.",
    ),
    # where the queries stand
    (
        {"query": floats(2, 4, 3, 8)},
        ValueError,
        "query_start must be given unless query and key have one length; got lengths 3 and 5. "
        "Give the position of the first query among the keys. Cross-attention has no relative positions.",
    ),
    (
        {"query_start": 1.0},
        TypeError,
        "query_start must be an integer or an integer tensor [batch]; got float. "
        "It is the position of the first query among the keys.",
    ),
    (
        {"query_start": True},
        TypeError,
        "query_start must be an integer or an integer tensor [batch]; got bool. "
        "It is the position of the first query among the keys.",
    ),
    (
        {"query_start": torch.zeros(2)},
        TypeError,
        "query_start must be a tensor of integers; got torch.float32. Convert it with .long().",
    ),
    (
        {"query_start": torch.zeros(3, dtype=torch.int64)},
        ValueError,
        f"query_start must be [batch] = [2]; got [3]. {ONE_A_SEQUENCE}",
    ),
    # masks
    (
        {"key_lengths": [5, 5]},
        TypeError,
        "key_lengths must be an integer tensor [batch] or None; got list. Make it a tensor.",
    ),
    (
        {"key_lengths": torch.ones(2, dtype=torch.bool)},
        TypeError,
        "key_lengths must be a tensor of integers; got torch.bool. Convert it with .long().",
    ),
    (
        {"key_lengths": torch.tensor(5)},
        ValueError,
        f"key_lengths must be [batch] = [2]; got []. {ONE_A_SEQUENCE}",
    ),
    (
        {"key_lengths": torch.tensor([5, 6])},
        ValueError,
        "key_lengths must be between 0 and the length of key = 5; got 6. It counts the keys that exist.",
    ),
    (
        {"key_lengths": torch.tensor([-1, 5])},
        ValueError,
        "key_lengths must be between 0 and the length of key = 5; got -1. It counts the keys that exist.",
    ),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a tensor or None; got list. Make it a tensor."),
    (
        {"attn_mask": torch.ones(5, 5, dtype=torch.int64)},
        TypeError,
        "attn_mask must be bool (True = may attend) or float (added to the logits); got torch.int64. "
        "Convert it with .bool().",
    ),
    (
        {"attn_mask": floats(2, 5)},
        ValueError,
        "attn_mask must be broadcastable to [batch, heads, query, key] = [2, 4, 5, 5]; got [2, 5]. "
        "Unsqueeze the dimensions that it is shared over.",
    ),
    (
        {"attn_mask": floats(1, 2, 4, 5, 5)},
        ValueError,
        "attn_mask must be broadcastable to [batch, heads, query, key] = [2, 4, 5, 5]; got [1, 2, 4, 5, 5]. "
        "Unsqueeze the dimensions that it is shared over.",
    ),
    # numbers and flags
    ({"is_causal": 1}, TypeError, "is_causal must be True or False; got int. Give a bool."),
    ({"return_lse": None}, TypeError, "return_lse must be True or False; got NoneType. Give a bool."),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number; got str. It is a probability."),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1; got 1.5. It is a probability."),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1; got -0.1. It is a probability."),
    ({"dropout_p": math.nan}, ValueError, "dropout_p must be between 0 and 1; got nan. It is a probability."),
    (
        {"scale": torch.tensor(0.5)},
        TypeError,
        "scale must be a number or None; got Tensor. Multiply query by what is learned.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[x[2][:60] for x in REFUSED])
def test_what_is_wrong_is_refused_by_name_and_number(
    changes: dict, error: type[Exception], message: str
) -> None:
    given = arguments(**changes)
    for call in (relative_attention, explain_backends):
        with pytest.raises(error) as raised:
            call(**given)
        assert str(raised.value) == message


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


def test_under_autocast_sums_stay_in_the_dtype_of_the_inputs(backend: str) -> None:
    given = arguments()
    truth = relative_attention(**given, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_attention(**given, backend=backend).equal(truth)
        low = {name: x.bfloat16() if name in ("query", "key", "value") else x for name, x in given.items()}
        mixed = low | {"key": low["key"].float(), "value": low["value"].float()}
        out = relative_attention(**low, backend=backend)
        assert out.dtype == torch.bfloat16
        assert relative_attention(**mixed, backend=backend).equal(out)
    assert relative_attention(**low, backend=backend).equal(out)


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
