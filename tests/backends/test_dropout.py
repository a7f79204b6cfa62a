"""Dropout inside the kernels of `cpu` and `triton`: which weights are dropped, in both passes the same.

The numbers are those of Philox4x32-10 (Salmon et al. 2011), written out here once more. How they spread is
tested on `cpu`, which is fast; both backends drop the same weights.
"""

import math

import pytest
import torch
from torch import Tensor

from conformance.cases import DEVICE, TENSORS, Case, attend, case, make, outcome
from conformance.skips import each_backend
from relpos import relation_attention, relative_attention
from relpos.backends.cpu import backend as cpu
from relpos.backends.triton import backend as triton

if DEVICE.type != "cpu":
    pytest.skip("runs the kernels on the CPU", allow_module_level=True)

both = pytest.mark.parametrize("backend", each_backend("merged", "dense"))
needs_cpu = pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton.UNAVAILABLE is None:
        from relpos.backends.triton import sizes

        monkeypatch.setattr(sizes, "interpreted", lambda _: sizes.Size(32, 16))


def philox(counter: tuple[Tensor, ...], key: int) -> tuple[Tensor, ...]:
    """The four numbers of 32 bits of each counter under a key of 64 bits; int64, whose products wrap."""
    a, b, c, d = counter
    mask = 2**32 - 1
    low, high = key & mask, key >> 32
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32 & mask) ^ b ^ low, y & mask, (x >> 32 & mask) ^ d ^ high, x & mask
        low, high = (low + 0x9E3779B9) & mask, (high + 0xBB67AE85) & mask
    return a, b, c, d


@pytest.mark.parametrize(
    ("word", "key", "known"),
    [
        (0, 0, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        (2**32 - 1, 2**64 - 1, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    ],
)
def test_philox_gives_the_known_answers_of_random123(word: int, key: int, known: list[str]) -> None:
    assert [f"{x.item():08x}" for x in philox((torch.tensor(word),) * 4, key)] == known


def kept(batch: int, heads: int, num_queries: int, num_keys: int, p: float, seed: int) -> Tensor:
    """Which weights stay under torch's seed: bool [batch, heads, query, key]."""
    torch.manual_seed(seed)
    key = torch.randint(2**63 - 1, (1,), dtype=torch.int64).item()
    num_fours = (num_keys + 3) // 4
    ranges = (torch.arange(size) for size in (batch * heads, num_queries, num_fours))
    group, i, four = torch.meshgrid(*ranges, indexing="ij")
    drawn = torch.stack(philox((i, four, group, torch.zeros_like(i)), key), -1)
    return drawn.view(batch, heads, num_queries, 4 * num_fours)[..., :num_keys] >= round(p * 2**32)


def kept_by(backend: str, sizes: tuple[int, int, int, int], p: float, dtype=torch.float32, seed=0) -> Tensor:
    """The same as the backend does it: with unit vectors as values, out[i] is the row of weights."""
    batch, heads, num_queries, num_keys = sizes
    query = torch.zeros(batch, heads, num_queries, 1, dtype=dtype)
    key = torch.zeros(batch, heads, num_keys, 1, dtype=dtype)
    value = torch.eye(num_keys, dtype=dtype).expand(batch, heads, num_keys, num_keys)
    torch.manual_seed(seed)
    return relative_attention(query, key, value, None, None, query_start=0, dropout_p=p, backend=backend) != 0


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_seed_drops_the_weights_that_philox_says(backend: str, dtype: torch.dtype) -> None:
    sizes = (2, 2, 35, 37)
    assert torch.equal(kept_by(backend, sizes, 0.3, dtype, seed=5), kept(*sizes, 0.3, seed=5))


CASES = {
    "cpu": (
        case("per head"),
        case("tables: neither"),
        case("values wider than keys"),
        case("grouped heads"),
        case("mask: float inf"),
        case("length 257, key lengths"),
        case("a start for each sequence, causal"),
        case("relations for batch"),
        case("one sentence is empty"),
        case("layout: transposed"),
        Case("splits of the keys", num_queries=3, num_keys=2100, query_start=700, batch=1, left=4, right=9),
        Case("three blocks", num_queries=130, num_keys=70, query_start=-3, batch=1),
    ),
    "triton": (
        Case("far", num_queries=50, num_keys=60, query_start=5, batch=1, heads=1, left=2, right=3),
        Case("causal", num_queries=40, batch=1, heads=1, is_causal=True),
        Case("labels", num_queries=20, num_keys=37, relations="batch", heads=1),
        Case("mask", num_queries=20, num_keys=37, query_start=11, mask="bool", heads=1),
        Case("numbers added", num_queries=35, mask="float inf", batch=1, heads=1, left=1, right=0),
        Case("grouped", num_keys=33, key_heads=1, query_start=(40, -9), key_lengths=(33, 17)),
        Case("keys, per head", num_queries=33, tables="keys", batch=1, is_per_head=True),
        Case("values", num_queries=33, tables="values", batch=1, heads=1, left=0, right=0),
    ),
}


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        pytest.param(backend.values[0], given, marks=backend.marks, id=f"{backend.values[0]}-{given}")
        for backend in each_backend("merged", "dense")
        for given in CASES[backend.values[0]]
    ],
)
def test_outputs_and_gradients_are_those_under_the_mask(
    backend: str, given: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, p = make(given), 0.4
    mask = kept(*arguments["query"].shape[:3], arguments["key"].shape[2], p, seed=11)
    assert 0 < mask.double().mean() < 1
    torch.manual_seed(11)
    found = outcome(*attend(backend, arguments | {"dropout_p": p}), arguments)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda weights, p: weights * mask / (1 - p))
    truth = outcome(*attend("reference", arguments | {"dropout_p": p}), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@both
@pytest.mark.parametrize(
    ("name", "p"), [("left over right", 1.0), ("relations for batch", 1.0), ("mask: float inf", 1.0 - 1e-13)]
)
def test_dropout_of_everything_gives_zeros_and_zero_gradients(backend: str, name: str, p: float) -> None:
    arguments = make(case(name))
    out, lse = attend(backend, arguments | {"dropout_p": p})
    assert torch.equal(out, torch.zeros_like(out))
    # lse knows of no dropout
    assert torch.equal(lse, attend(backend, arguments)[1])
    for grad in torch.autograd.grad(out.sum(), [arguments[name] for name in TENSORS]):
        assert torch.equal(grad, torch.zeros_like(grad))


@both
def test_no_dropout_draws_no_number_and_a_tiny_one_drops_nothing(backend: str) -> None:
    arguments = make(case("left over right"))
    before = torch.get_rng_state()
    plain = relative_attention(**arguments, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)
    found = relative_attention(**arguments, dropout_p=1e-12, backend=backend)
    torch.testing.assert_close(found, plain, atol=1e-11, rtol=0)
    assert not torch.equal(torch.get_rng_state(), before)


@both
@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "compiled"])
@pytest.mark.parametrize("attention", [relative_attention, relation_attention])
def test_the_backward_pass_finds_the_mask_again(backend: str, way: str, attention) -> None:
    labels = {"relations": "pairs"} if attention is relation_attention else {}
    arguments = make(Case("any", num_queries=35, batch=1, heads=1, tables="keys", **labels))
    value = arguments.pop("value")

    def call(value: Tensor) -> Tensor:
        query, key = arguments["query"], arguments["key"]
        rest = {name: x for name, x in arguments.items() if name not in ("query", "key")}
        return attention(query, key, value, **rest, dropout_p=0.5, backend=backend)

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


@needs_cpu
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_and_spreads_as_chance_does(p: float) -> None:
    mask = kept_by("cpu", (2, 4, 300, 300), p)
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs((~mask).float().mean() - p) < 5 * sigma
    # how many each query, each key and each head loses: as many as chance has it, and as unevenly
    for dims, size in (((3,), 300), ((2,), 300), ((2, 3), 90_000)):
        counts = (~mask).float().sum(dims).flatten()
        spread = (counts - p * size).square().mean() / (p * (1 - p) * size)
        assert abs(spread - 1) < 6 * math.sqrt(2 / counts.numel())


@needs_cpu
@pytest.mark.parametrize("kind", ["heads", "queries", "keys"])
def test_no_two_heads_queries_or_keys_lose_the_same(kind: str) -> None:
    kept_ones = kept_by("cpu", (3, 4, 200, 300), 0.5)
    signs = torch.where(kept_ones, 1.0, -1.0).flatten(0, 1)  # heads of all, query, key
    of_each = signs.movedim({"heads": 0, "queries": 1, "keys": 2}[kind], 0).flatten(1)
    correlation = of_each @ of_each.T / of_each.shape[1]
    assert correlation.fill_diagonal_(0.0).abs().max() < 6 / math.sqrt(of_each.shape[1])


@needs_cpu
def test_the_mask_does_not_depend_on_how_keys_and_queries_are_split() -> None:
    few = kept_by("cpu", (1, 1, 2, 2500), 0.5)
    assert torch.equal(few, kept(1, 1, 2, 2500, 0.5, seed=0))
    # one in a million is not nothing
    assert 0 < (~kept_by("cpu", (1, 4, 2000, 1500), 1e-6)).sum() < 40


@both
def test_weights_that_stay_grow_by_the_share_of_those_dropped(backend: str) -> None:
    x = torch.zeros(1, 1, 8, 1)
    out = relative_attention(x, x, torch.eye(8)[None, None], None, None, dropout_p=0.75, backend=backend)
    assert torch.equal(out[out != 0].unique(), torch.tensor([0.5]))  # 1 / 8 / (1 - 0.75)
