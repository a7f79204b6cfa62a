"""Dropout inside the kernel: which weights it drops, and that both passes drop the same ones.

A mask is seen through values that are the unit vectors: out[i] is then the row of weights that were kept.
"""

import math

import pytest
import torch
from torch import Tensor

from conformance.cases import TENSORS, Case, attend, case, make, outcome
from relpos import relation_attention, relative_attention
from relpos.backends.cpu import backend as cpu

pytestmark = pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}")

CASES = (
    case("per head"),
    case("tables: tied"),
    case("tables: neither"),
    case("values wider than keys"),
    case("grouped heads"),
    case("mask: float inf"),
    case("length 257, key lengths"),
    case("a start for each sequence, causal"),
    case("chunk of a static cache"),
    case("relations for batch"),
    case("one sentence is empty"),
    case("layout: transposed"),
    Case("splits of the keys", num_queries=3, num_keys=2100, query_start=700, batch=1, left=4, right=9),
    Case("three blocks", num_queries=130, num_keys=70, query_start=-3, batch=1),
)


def kept(batch: int, heads: int, num_queries: int, num_keys: int, p: float, seed: int = 0) -> Tensor:
    """Which weights a call of these sizes keeps under a seed: bool [batch, heads, query, key]."""
    query, key = torch.zeros(batch, heads, num_queries, 1), torch.zeros(batch, heads, num_keys, 1)
    value = torch.eye(num_keys).expand(batch, heads, num_keys, num_keys)
    torch.manual_seed(seed)
    out = relative_attention(query, key, value, None, None, query_start=0, dropout_p=p, backend="cpu")
    return out != 0


@pytest.mark.parametrize("given", CASES, ids=str)
def test_outputs_and_gradients_are_those_under_the_mask_of_the_forward_pass(
    given: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, p = make(given), 0.4
    m = arguments["key"].shape[2]
    mask = kept(given.batch, given.heads, given.num_queries, m, p, seed=11)
    torch.manual_seed(11)
    found = outcome(*attend("cpu", arguments | {"dropout_p": p}), arguments)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda weights, p: weights * mask / (1 - p))
    truth = outcome(*attend("reference", arguments | {"dropout_p": p}), arguments)
    assert 0 < mask.float().mean() < 1
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_one_seed_gives_one_mask_and_another_seed_another() -> None:
    assert torch.equal(kept(2, 2, 70, 70, 0.5, seed=1), kept(2, 2, 70, 70, 0.5, seed=1))
    first, second = kept(2, 2, 70, 70, 0.5, seed=1), kept(2, 2, 70, 70, 0.5, seed=2)
    assert abs((first == second).float().mean() - 0.5) < 5 * 0.5 / math.sqrt(first.numel())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_and_spreads_as_chance_does(p: float) -> None:
    mask = kept(2, 4, 300, 300, p)
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs((~mask).float().mean() - p) < 5 * sigma
    # how many each query, each key and each head loses: as many as chance has it, and as unevenly
    for dims, size in (((3,), 300), ((2,), 300), ((2, 3), 90_000)):
        counts = (~mask).float().sum(dims).flatten()
        spread = (counts - p * size).square().mean() / (p * (1 - p) * size)
        assert abs(spread - 1) < 6 * math.sqrt(2 / counts.numel())


@pytest.mark.parametrize(
    "step",
    [(0, 0, 0, 1), (0, 0, 0, 4), (0, 0, 1, 0), (0, 0, 64, 0), (0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 0)],
    ids=str,
)
def test_neighbours_are_dropped_independently(step: tuple[int, ...]) -> None:
    mask = (~kept(3, 3, 200, 200, 0.3)).float() - 0.3
    ahead, behind = mask, mask
    for d, s in enumerate(step):
        ahead, behind = ahead.narrow(d, s, mask.shape[d] - s), behind.narrow(d, 0, mask.shape[d] - s)
    correlation = (ahead * behind).mean() / (0.3 * 0.7)
    assert abs(correlation) < 5 / math.sqrt(ahead.numel())


@pytest.mark.parametrize("kind", ["heads", "queries", "keys"])
def test_no_two_heads_queries_or_keys_lose_the_same(kind: str) -> None:
    signs = torch.where(kept(3, 4, 200, 300, 0.5), 1.0, -1.0).flatten(0, 1)  # heads of all, query, key
    of_each = signs.movedim({"heads": 0, "queries": 1, "keys": 2}[kind], 0).flatten(1)
    correlation = of_each @ of_each.T / of_each.shape[1]
    assert correlation.fill_diagonal_(0.0).abs().max() < 6 / math.sqrt(of_each.shape[1])


def test_the_mask_does_not_depend_on_what_else_is_asked() -> None:
    whole = kept(2, 2, 130, 200, 0.5)
    assert torch.equal(kept(1, 2, 130, 200, 0.5), whole[:1])
    assert torch.equal(kept(2, 2, 64, 131, 0.5), whole[:, :, :64, :131])
    few = kept(1, 1, 2, 2500, 0.5)
    assert torch.equal(few[..., :200], kept(1, 1, 130, 200, 0.5)[:, :, :2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_mask_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    x, value = torch.zeros(1, 1, 70, 2, dtype=dtype), torch.eye(70, dtype=dtype)[None, None]
    torch.manual_seed(0)
    out = relative_attention(x, x, value, None, None, dropout_p=0.5, backend="cpu")
    assert torch.equal(out != 0, kept(1, 1, 70, 70, 0.5))


def test_what_is_kept_grows_and_lse_knows_of_no_dropout() -> None:
    arguments = make(case("length 63, causal"))
    torch.manual_seed(0)
    _, lse = attend("cpu", arguments | {"dropout_p": 0.5})
    assert torch.equal(lse, attend("cpu", arguments)[1])
    x = torch.zeros(1, 1, 8, 1)
    out = relative_attention(x, x, torch.eye(8)[None, None], None, None, dropout_p=0.75, backend="cpu")
    assert torch.equal(out[out != 0].unique(), torch.tensor([0.5]))  # 1 / 8 / (1 - 0.75)


def test_no_dropout_draws_no_number_and_a_tiny_one_drops_nothing() -> None:
    arguments = make(case("per head"), torch.float32)
    before = torch.get_rng_state()
    plain = relative_attention(**arguments, backend="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(relative_attention(**arguments, dropout_p=1e-12, backend="cpu"), plain)
    # one in a million is not nothing
    assert 0 < (~kept(1, 4, 2000, 1500, 1e-6)).sum() < 40


@pytest.mark.parametrize("p", [1.0, 1.0 - 1e-13])
def test_dropout_of_everything_gives_zeros_and_zero_gradients(p: float) -> None:
    arguments = make(case("per head"))
    out = relative_attention(**arguments, dropout_p=p, backend="cpu")
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), [arguments[name] for name in TENSORS]):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "compiled"])
@pytest.mark.parametrize("attention", [relative_attention, relation_attention])
def test_the_backward_pass_finds_the_mask_again(way: str, attention) -> None:
    labels = {"relations": "pairs"} if attention is relation_attention else {}
    arguments = make(Case("any", num_queries=70, tables="keys", **labels))
    value = arguments.pop("value")

    def call(value: Tensor) -> Tensor:
        query, key = arguments["query"], arguments["key"]
        rest = {name: x for name, x in arguments.items() if name not in ("query", "key")}
        return attention(query, key, value, **rest, dropout_p=0.5, backend="cpu")

    if way == "compiled":
        torch._dynamo.reset()
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(value)
    else:
        is_reentrant = way == "reentrant checkpoint"
        out = torch.utils.checkpoint.checkpoint(call, value, use_reentrant=is_reentrant)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    # out is a matrix times value, and the gradient of value its transpose times grad_out
    torch.testing.assert_close((value * value.grad).sum(), (out * grad_out).sum(), atol=1e-9, rtol=1e-9)
    assert not torch.equal(out, call(value))
