"""Laws of attention with relative positions that some implementation has broken; every backend keeps them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.cases import TENSORS, attend
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


def test_two_before_and_two_after_differ(backend: str) -> None:
    arguments = draw(6)
    before, after = (run(backend, arguments, rel_k=one_hot_table(x, 2, 4)) for x in (-2, 2))
    assert (before - after).abs().max() > 0.01


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("sides", [*((k, k) for k in range(7)), (3, 1), (0, 2), (4, 0)], ids=str)
def test_every_pair_reads_its_row(backend: str, n: int, sides: tuple[int, int]) -> None:
    # value rows are unit vectors of labels, so the output sums the weights of each label
    (left, right), labels = sides, sum(sides) + 1
    arguments = draw(n, b=1, h=1, max_distance=sides)
    arguments["rel_k"] = torch.randn(labels, 4, dtype=torch.float64)
    found = run(
        backend,
        arguments,
        value=torch.zeros(1, 1, n, labels, dtype=torch.float64),
        rel_v=torch.eye(labels, dtype=torch.float64),
    )
    by_pair = weights(backend, arguments)
    logits = torch.zeros(n, n, dtype=torch.float64)
    truth = torch.zeros(n, labels, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            row = min(max(j - i, -left), right) + left
            logits[i, j] = arguments["query"][0, 0, i] @ (arguments["key"][0, 0, j] + arguments["rel_k"][row])
            truth[i, row] += by_pair[0, 0, i, j]
    assert_equal(by_pair[0, 0], torch.softmax(logits / 2, -1))
    assert_equal(found[0, 0], truth)


@pytest.mark.parametrize("d", [4, 64])
@pytest.mark.parametrize("scale", [None, 0.7, 0.0, -1.5])
def test_scale_multiplies_content_and_position_alike(backend: str, d: int, scale: float | None) -> None:
    n, k = 5, 2
    arguments = draw(n, d=d, h=3, k=k)
    found = run(backend, arguments, scale=scale)
    query, key, value, rel_k, rel_v = (arguments[name] for name in TENSORS)
    for b, h, i in [(0, 0, 0), (0, 2, 3), (1, 1, 4)]:
        rows = [min(max(j - i, -k), k) + k for j in range(n)]
        logits = [
            (1 / math.sqrt(d) if scale is None else scale)
            * torch.dot(query[b, h, i], key[b, h, j] + rel_k[r]).item()
            for j, r in enumerate(rows)
        ]
        total = sum(math.exp(x) for x in logits)
        truth = sum(
            math.exp(x) / total * (value[b, h, j] + rel_v[r])
            for j, (x, r) in enumerate(zip(logits, rows, strict=True))
        )
        assert_equal(found[b, h, i], truth)


def test_a_table_for_each_head_equals_each_head_alone(backend: str) -> None:
    arguments = draw(6, h=3)
    tables = {name: torch.randn(3, 5, 4, dtype=torch.float64) for name in ("rel_k", "rel_v")}
    found = run(backend, arguments | tables)
    for head in range(3):
        alone = {name: arguments[name][:, head : head + 1] for name in ("query", "key", "value")}
        alone |= {name: table[head] for name, table in tables.items()}
        assert_equal(found[:, head : head + 1], run(backend, alone))


def test_grouped_heads_equal_repeated_heads(backend: str) -> None:
    arguments = draw(6, h=6)
    few = {name: arguments[name][:, :2] for name in ("key", "value")}
    repeated = {name: x.repeat_interleave(3, dim=1) for name, x in few.items()}
    assert_equal(run(backend, arguments | few), run(backend, arguments | repeated))


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


def test_order_matters_with_tables_and_not_without(backend: str) -> None:
    arguments = draw(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = arguments | {name: arguments[name][:, :, order] for name in ("query", "key", "value")}
    without = {"rel_k": None, "rel_v": None}
    assert_equal(run(backend, shuffled | without), run(backend, arguments | without)[:, :, order])
    assert (run(backend, shuffled) - run(backend, arguments)[:, :, order]).abs().max() > 0.01


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


def test_a_length_far_beyond_the_clip_repeats_the_last_rows(backend: str) -> None:
    n, k = 40, 2
    arguments = draw(n, k=k)
    rows = torch.arange(1 - n, n).clamp(-k, k) + k
    full = {name: arguments[name][rows] for name in ("rel_k", "rel_v")}
    assert_equal(run(backend, arguments), run(backend, arguments | full))


def test_with_k_0_keys_change_nothing_and_values_add_one_vector(backend: str) -> None:
    arguments = draw(5, k=0)
    plain = run(backend, arguments, rel_k=None, rel_v=None)
    assert_equal(run(backend, arguments, rel_v=None), plain)
    assert_equal(run(backend, arguments, rel_k=None), plain + arguments["rel_v"])


def test_one_token_is_its_value_and_the_row_of_itself(backend: str) -> None:
    arguments = draw(1)
    assert_equal(run(backend, arguments), arguments["value"] + arguments["rel_v"][2])


# decoding with a cache


def decoded(backend: str, arguments: dict, cuts: list[int], is_causal: bool) -> Tensor:
    """The outputs of chunks that end at `cuts`, over the keys that a cache would hold."""
    outs, begin = [], 0
    for end in cuts:
        held = end if is_causal else arguments["key"].shape[2]
        chunk = {"query": arguments["query"][:, :, begin:end]}
        chunk |= {name: arguments[name][:, :, :held] for name in ("key", "value")}
        outs.append(run(backend, arguments | chunk, query_start=begin, is_causal=is_causal))
        begin = end
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("cuts", [list(range(1, 10)), [3, 6, 9], [1, 5, 7, 9], [4, 9], [18, 19, 30]], ids=str)
@pytest.mark.parametrize("k", [2, 40])
def test_steps_and_chunks_equal_one_pass(backend: str, k: int, cuts: list[int], is_causal: bool) -> None:
    arguments = draw(cuts[-1], k=k)
    assert_equal(decoded(backend, arguments, cuts, is_causal), run(backend, arguments, is_causal=is_causal))


def test_a_static_cache_that_is_longer_than_what_it_holds_changes_nothing(backend: str) -> None:
    arguments = draw(9)
    truth = run(backend, arguments, is_causal=True)
    cache = {name: torch.full((2, 2, 32, 4), math.nan, dtype=torch.float64) for name in ("key", "value")}
    for i in range(9):
        for name in cache:
            cache[name][:, :, i] = arguments[name][:, :, i]
        step = {"query": arguments["query"][:, :, i : i + 1], "key_lengths": torch.tensor([i + 1, i + 1])}
        assert_equal(run(backend, arguments | cache | step, query_start=i), truth[:, :, i : i + 1])
        step["query_start"] = torch.tensor([i, i])
        assert_equal(run(backend, arguments | cache | step, is_causal=True), truth[:, :, i : i + 1])


@pytest.mark.parametrize("name", ["rel_k", "rel_v"])
def test_zeroing_a_table_changes_a_cached_step_too(backend: str, name: str) -> None:
    arguments = draw(1, m=5)
    step = run(backend, arguments, query_start=4)
    zeroed = run(backend, arguments | {name: arguments[name] * 0}, query_start=4)
    assert (step - zeroed).abs().max() > 0.01


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_batch_of_different_starts_equals_each_alone(backend: str, is_causal: bool) -> None:
    arguments = draw(3, m=8, b=3)
    starts = torch.tensor([0, 5, 2])
    found = run(backend, arguments, query_start=starts, is_causal=is_causal)
    for s, start in enumerate(starts.tolist()):
        alone = {name: arguments[name][s : s + 1] for name in ("query", "key", "value")}
        assert_equal(
            found[s : s + 1], run(backend, arguments | alone, query_start=start, is_causal=is_causal)
        )


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_masked_token_before_all_others_leaves_them_as_they_were(backend: str, is_causal: bool) -> None:
    arguments = draw(6)
    truth = run(backend, arguments, is_causal=is_causal)
    longer = {name: F.pad(arguments[name], (0, 0, 1, 0), value=9.0) for name in ("key", "value")}
    mask = torch.arange(7) > 0
    found = run(backend, arguments | longer, query_start=1, attn_mask=mask, is_causal=is_causal)
    assert_equal(found, truth)
    # the same with a query of its own: left padding
    longer["query"] = F.pad(arguments["query"], (0, 0, 1, 0), value=9.0)
    found = run(backend, arguments | longer, attn_mask=mask, is_causal=is_causal)
    assert_equal(found[:, :, 1:], truth)


def test_a_stream_with_left_context_equals_one_pass_under_a_band(backend: str) -> None:
    n, chunk, context = 12, 4, 3
    arguments = draw(n)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    band = (j <= i) & (j >= i - context)
    truth = run(backend, arguments, attn_mask=band)
    for begin in range(0, n, chunk):
        first, end = max(0, begin - context), begin + chunk
        part = {"query": arguments["query"][:, :, begin:end], "attn_mask": band[begin:end, first:end]}
        part |= {name: arguments[name][:, :, first:end] for name in ("key", "value")}
        assert_equal(run(backend, arguments | part, query_start=begin - first), truth[:, :, begin:end])


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


def test_dropped_weights_feed_both_value_terms(backend: str) -> None:
    arguments = draw(8, dropout_p=0.5)
    arguments["value"] = torch.ones_like(arguments["value"])
    outs = []
    for value, rel_v in ((1, 0), (0, 10), (1, 10)):
        torch.manual_seed(3)
        tables = {"rel_v": torch.full_like(arguments["rel_v"], rel_v)}
        outs.append(run(backend, arguments | tables, value=arguments["value"] * value))
    assert outs[0].std() > 0.01
    assert_equal(outs[1], 10 * outs[0])
    assert_equal(outs[2], 11 * outs[0])


def test_dropout_keeps_the_expectation(backend: str) -> None:
    arguments = draw(3, b=1, h=1)
    # the interpreter of triton takes minutes for 20,000 programs
    count = 500 if backend == "triton" else 20_000
    many = {name: arguments[name].expand(count, 1, 3, 4) for name in ("query", "key", "value")}
    torch.manual_seed(0)
    outs = run(backend, arguments | many, dropout_p=0.3)
    error = outs.mean(0) - run(backend, arguments)[0]
    assert (error.abs() < 5 * outs.std(0) / math.sqrt(count)).all()
    assert outs.std(0).min() > 0.05


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


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adafactor])
def test_optimizers_move_the_rows_that_are_used_and_no_others(backend: str, optimizer: type) -> None:
    arguments = draw(3, b=1, h=1, k=4)
    tables = [arguments[name].float().requires_grad_() for name in ("rel_k", "rel_v")]
    before = [table.detach().clone() for table in tables]
    tokens = {name: arguments[name].float() for name in ("query", "key", "value")}
    stepper = optimizer(tables, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        stepper.zero_grad()
        run(
            backend, tokens | {"rel_k": tables[0], "rel_v": tables[1]}, is_causal=True
        ).square().sum().backward()
        stepper.step()
    for table, old in zip(tables, before, strict=True):
        used = [2, 3, 4]  # distances -2, -1 and 0; row 4 is distance 0
        assert (table[used] != old[used]).any(-1).all()
        assert table[:2].equal(old[:2])
        assert table[5:].equal(old[5:])


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
