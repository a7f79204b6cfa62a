"""Laws of attention with relative positions that some implementation has broken; every backend keeps them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.cases import attend
from relpos.nn import KeyValueCache, RelativeMultiheadAttention


def draw(n: int, *, m: int | None = None, b: int = 2, h: int = 2, d: int = 4, k: int = 2, **changes) -> dict:
    """float64 arguments of self-attention over n tokens, with changes."""
    torch.manual_seed(n)
    m = n if m is None else m
    shapes = {"query": (b, h, n, d), "key": (b, h, m, d), "value": (b, h, m, d)}
    shapes |= {"rel_k": (2 * k + 1, d), "rel_v": (2 * k + 1, d)}
    return {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()} | changes


def run(backend: str, arguments: dict, **changes) -> Tensor:
    return attend(backend, arguments | changes)[0]


def weights(backend: str, arguments: dict, **changes) -> Tensor:
    """[batch, heads, query, key]: the output where value j is unit vector j and positions add nothing."""
    b, h, m, _ = arguments["key"].shape
    units = torch.eye(m, dtype=torch.float64).expand(b, h, m, m)
    return run(backend, arguments | {"value": units, "rel_v": None}, **changes)


def assert_equal(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found, truth, atol=1e-12, rtol=1e-10)


def one_hot_table(distance: int, k: int, width: int, size: float = 1.0) -> Tensor:
    """[2k + 1, width] with `size` in the row of a distance and 0 elsewhere."""
    table = torch.zeros(2 * k + 1, width, dtype=torch.float64)
    table[k + distance] = size
    return table


# sign, scale, sharing


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_one_row_of_keys_lights_its_own_diagonal_only(backend: str, distance: int) -> None:
    n = 7
    ones = torch.ones(1, 1, n, 1, dtype=torch.float64)
    arguments = {"query": ones, "key": ones * 0, "value": ones, "rel_v": None}
    found = weights(backend, arguments, rel_k=one_hot_table(distance, 3, 1, math.log(5)))
    for i in range(n):
        row = torch.ones(n, dtype=torch.float64)
        if 0 <= i + distance < n:
            row[i + distance] = 5
        assert_equal(found[0, 0, i], row / row.sum())


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_one_row_of_values_lights_its_own_diagonal_only(backend: str, distance: int) -> None:
    n = 6
    arguments = draw(n, k=3)
    found = run(backend, arguments, value=arguments["value"] * 0, rel_v=one_hot_table(distance, 3, 4))
    diagonal = torch.zeros(2, 2, n, dtype=torch.float64)
    for i in range(max(0, -distance), min(n, n - distance)):
        diagonal[:, :, i] = weights(backend, arguments)[:, :, i, i + distance]
    assert_equal(found, diagonal[..., None].expand_as(found))


# what it is without positions


@pytest.mark.parametrize("tables", ["zero", "none"])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_zero_tables_give_plain_attention(backend: str, tables: str, mask: str | None) -> None:
    arguments = draw(9)
    zeros = None if tables == "none" else torch.zeros(5, 4, dtype=torch.float64)
    attn_mask = None
    if mask == "bool":
        attn_mask = torch.rand(2, 1, 9, 9) < 0.7
        attn_mask[..., 0] = True
    elif mask == "float":
        attn_mask = torch.randn(9, 9, dtype=torch.float64)
    plain = F.scaled_dot_product_attention(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        attn_mask=attn_mask,
        is_causal=mask == "causal",
        scale=0.3,
    )
    found = run(
        backend,
        arguments,
        rel_k=zeros,
        rel_v=zeros,
        attn_mask=attn_mask,
        is_causal=mask == "causal",
        scale=0.3,
    )
    assert_equal(found, plain)


def test_one_token_gets_another_state_in_another_place(backend: str) -> None:
    # "I love you and you love me": both "love" alike without tables, apart with them
    words = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sentence = words[torch.tensor([0, 1, 2, 3, 2, 1, 4])][None, None]
    arguments = draw(7) | {name: sentence for name in ("query", "key", "value")}
    out = run(backend, arguments, rel_k=None, rel_v=None)
    assert_equal(out[0, 0, 1], out[0, 0, 5])
    out = run(backend, arguments)
    assert (out[0, 0, 1] - out[0, 0, 5]).abs().max() > 0.01


# length and range


def test_a_clip_beyond_the_length_is_no_clip(backend: str) -> None:
    n = 6
    arguments = draw(n, k=n - 1)
    wide = {}
    for name in ("rel_k", "rel_v"):
        wide[name] = torch.randn(2 * 40 + 1, 4, dtype=torch.float64)
        wide[name][40 - n + 1 : 40 + n] = arguments[name]
    assert_equal(run(backend, arguments | wide), run(backend, arguments))


def test_with_k_0_keys_change_nothing_and_values_add_one_vector(backend: str) -> None:
    arguments = draw(5, k=0)
    plain = run(backend, arguments, rel_k=None, rel_v=None)
    assert_equal(run(backend, arguments, rel_v=None), plain)
    assert_equal(run(backend, arguments, rel_k=None), plain + arguments["rel_v"])


def test_one_token_is_its_value_and_the_row_of_itself(backend: str) -> None:
    arguments = draw(1)
    assert_equal(run(backend, arguments), arguments["value"] + arguments["rel_v"][2])


# decoding with a cache


def test_layers_fed_in_chunks_with_left_context_equal_one_pass_under_a_band() -> None:
    n, chunk, context = 12, 4, 3
    torch.manual_seed(0)
    layers = [
        RelativeMultiheadAttention(8, 2, batch_first=True, max_distance=2, dtype=torch.float64)
        for _ in range(3)
    ]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    hidden = (j > i) | (j < i - context)
    x = torch.randn(2, n, 8, dtype=torch.float64)
    truth = x
    for layer in layers:
        truth = truth + layer(truth, truth, truth, attn_mask=hidden, need_weights=False)[0]
    caches = [KeyValueCache() for _ in layers]
    for begin in range(0, n, chunk):
        end = begin + chunk
        found = x[:, begin:end]
        for layer, cache in zip(layers, caches, strict=True):
            part = {"attn_mask": hidden[begin:end, :end], "need_weights": False, "cache": cache}
            found = found + layer(found, found, found, **part)[0]
        assert_equal(found, truth[:, begin:end])


# masks


def test_a_masked_key_gets_no_gradient(backend: str) -> None:
    arguments = draw(6)
    for name in ("key", "value"):
        arguments[name].requires_grad_()
    mask = torch.tensor([True, True, False, True, False, True])
    grads = torch.autograd.grad(
        run(backend, arguments, attn_mask=mask).square().sum(), [arguments["key"], arguments["value"]]
    )
    for grad in grads:
        assert (grad[:, :, ~mask] == 0).all()
        assert (grad[:, :, mask] != 0).all()


def test_causal_means_that_no_gradient_reaches_the_future(backend: str) -> None:
    arguments = draw(6)
    tokens = {name: arguments[name].requires_grad_() for name in ("query", "key", "value")}
    out = run(backend, arguments, is_causal=True)
    for i in range(6):
        for grad in torch.autograd.grad(out[:, :, i].sum(), list(tokens.values()), retain_graph=True):
            assert (grad[:, :, i + 1 :] == 0).all()


@pytest.mark.parametrize("kind", ["lengths", "bool", "float", "float16 constant"])
def test_an_all_padding_row_is_finite_forward_and_backward(backend: str, kind: str) -> None:
    dtype = torch.float16 if kind == "float16 constant" else torch.float64
    arguments = draw(4)
    arguments = {name: x.to(dtype).requires_grad_() for name, x in arguments.items()}
    masks = {
        "lengths": {"key_lengths": torch.tensor([0, 4])},
        "bool": {"attn_mask": torch.tensor([False, True])[:, None, None, None]},
        "float": {"attn_mask": torch.tensor([-math.inf, 0.0])[:, None, None, None]},
        "float16 constant": {
            "attn_mask": torch.tensor([torch.finfo(dtype).min, 0.0], dtype=dtype)[:, None, None, None]
        },
    }
    out, lse = attend(backend, arguments | masks[kind])
    if kind != "float16 constant":
        assert (out[0] == 0).all()
        assert (lse[0] == -math.inf).all()
    assert out.isfinite().all()
    for name, grad in zip(arguments, torch.autograd.grad(out.sum(), list(arguments.values())), strict=True):
        assert grad.isfinite().all()
        if kind != "float16 constant" and name in ("query", "key", "value"):
            assert (grad[0] == 0).all()


def test_a_float_mask_is_added_once_and_not_scaled(backend: str) -> None:
    zeros = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    arguments = {
        "query": zeros,
        "key": zeros,
        "value": zeros,
        "rel_k": torch.ones(3, 1).double(),
        "rel_v": None,
    }
    mask = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    found = weights(backend, arguments, attn_mask=mask, scale=0.1)
    assert_equal(found, torch.tensor([0.25, 0.75], dtype=torch.float64).expand(1, 1, 2, 2))


# dropout


def test_dropout_of_everything_gives_zeros(backend: str) -> None:
    assert (run(backend, draw(4), dropout_p=1.0) == 0).all()


# training


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("tables", ["both", "keys", "values"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_table_gets_a_dense_gradient_and_unused_rows_get_zeros(
    backend: str, k: int, tables: str, is_causal: bool
) -> None:
    arguments = draw(2, k=k)
    for name, absent in (("rel_k", "values"), ("rel_v", "keys")):
        arguments[name] = None if tables == absent else arguments[name].requires_grad_()
    given_tables = [x for x in (arguments["rel_k"], arguments["rel_v"]) if x is not None]
    for grad in torch.autograd.grad(
        run(backend, arguments, is_causal=is_causal).square().sum(), given_tables
    ):
        assert grad.layout == torch.strided
        if k == 2:
            unused = [0, 4, 3] if is_causal else [0, 4]  # two tokens: distances -1, 0 and, unless causal, 1
            assert (grad[unused] == 0).all()
            assert (grad[1:3] != 0).all()


# precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_tables_beside_a_low_precision_query_are_not_rounded(
    backend: str, dtype: torch.dtype
) -> None:
    # two tokens; the logits are those of rel_k, and what a rounding of 1 + 2**-12 loses shows in their sum
    ones, small = torch.ones(1, 1, 2, 1, dtype=dtype), 2.0**-12
    arguments = {"query": ones, "key": ones * 0, "value": ones * 0}
    rel_k = torch.tensor([[1.0], [1.0 + small], [1.0]])
    _, lse = attend(backend, arguments | {"rel_k": rel_k, "rel_v": None})
    truth = torch.tensor([1.0, 1.0 + small]).double().logsumexp(0).float()
    torch.testing.assert_close(lse, truth.expand(1, 1, 2), atol=2e-6, rtol=0.0)
    rel_v = torch.tensor([[-1.0], [1.0 + small], [-1.0]])
    out = run(backend, arguments | {"rel_k": None, "rel_v": rel_v})
    assert out.equal(torch.full_like(out, small / 2))
    # the first key takes from its row of the table what it rounds to; the logit gets a quarter
    query = ones[:, :, :1].clone().requires_grad_()
    key, value = (torch.tensor([x, 0.0], dtype=dtype).view(1, 1, 2, 1) for x in (-1.0, 1.0))
    rel_k = torch.tensor([[0.0], [1.0 + small], [0.0]])
    arguments = {"query": query, "key": key, "value": value, "query_start": 0}
    out = run(backend, arguments | {"rel_k": rel_k, "rel_v": None})
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad.item() == pytest.approx(small / 4, rel=0.01)
