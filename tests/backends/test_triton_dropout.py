"""Dropout inside Triton's kernels, interpreted: which weights they drop, and that both passes drop the same.

The numbers are those of Philox4x32-10 (Salmon et al. 2011), written out here once more; how they are spread
is shown for the kernel of the backend `cpu`, which draws the same.
"""

import pytest
import torch
from torch import Tensor

from conformance.cases import TENSORS, Case, attend, case, make, outcome
from relpos import relation_attention, relative_attention
from relpos.backends.cpu import backend as cpu
from relpos.backends.triton import backend as triton

if triton.UNAVAILABLE is not None or not triton.IS_INTERPRETED:
    pytest.skip(f"triton: {triton.UNAVAILABLE or 'is not interpreted'}", allow_module_level=True)

from relpos.backends.triton import sizes

MASK = 2**32 - 1


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """The four numbers of 32 bits of a counter under a key of 64 bits."""
    a, b, c, d = counter
    low, high = key & MASK, key >> 32
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ low, y & MASK, (x >> 32) ^ d ^ high, x & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return a, b, c, d


def kept(batch: int, heads: int, num_queries: int, num_keys: int, p: float, seed: int) -> Tensor:
    """Which weights stay under torch's seed: bool [batch, heads, query, key]."""
    torch.manual_seed(seed)
    key = torch.randint(2**63 - 1, (1,), dtype=torch.int64).item()
    fours = range((num_keys + 3) // 4)
    numbers = [
        [philox((i, four, group, 0), key) for four in fours]
        for group in range(batch * heads)
        for i in range(num_queries)
    ]
    drawn = torch.tensor(numbers).view(batch, heads, num_queries, 4 * len(fours))
    return drawn[..., :num_keys] >= round(p * 2**32)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "interpreted", lambda _: sizes.Size(32, 16))


def test_philox_gives_the_numbers_that_its_authors_list() -> None:
    # the known answers of Random123 for a counter and a key of zeros, and of ones
    assert [f"{x:08x}" for x in philox((0, 0, 0, 0), 0)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert [f"{x:08x}" for x in philox((MASK,) * 4, 2**64 - 1)] == [
        *("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")
    ]


CASES = (
    Case("far on both sides", num_queries=50, num_keys=60, query_start=5, batch=1, heads=1, left=2, right=3),
    Case("causal", num_queries=40, batch=1, heads=1, is_causal=True),
    Case("labels", num_queries=20, num_keys=37, relations="batch"),
    Case("mask", num_queries=20, num_keys=37, query_start=11, mask="bool", heads=1),
    Case("numbers added", num_queries=35, mask="float inf", batch=1, left=1, right=0),
    Case(
        "grouped, a start each, lengths",
        num_keys=33,
        heads=2,
        key_heads=1,
        query_start=(40, -9),
        key_lengths=(33, 17),
    ),
    Case("no tables", num_queries=33, tables="neither", batch=1),
    Case("keys", num_queries=33, tables="keys", batch=1, is_per_head=True),
    Case("values", num_queries=33, tables="values", batch=1, left=0, right=0),
)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_outputs_and_gradients_are_those_under_the_mask_of_the_forward_pass(
    given: Case, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make(given)
    mask = kept(*arguments["query"].shape[:3], arguments["key"].shape[2], p, seed=11)
    assert 0 < mask.double().mean() < 1
    torch.manual_seed(11)
    found = outcome(*attend("triton", arguments | {"dropout_p": p}), arguments)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda weights, p: weights * mask / (1 - p))
    truth = outcome(*attend("reference", arguments | {"dropout_p": p}), arguments)
    for name, x in truth.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_seed_drops_the_same_weights_on_the_cpu(dtype: torch.dtype) -> None:
    x, value = torch.zeros(2, 2, 19, 1, dtype=dtype), torch.eye(37, dtype=dtype).expand(2, 2, 37, 37)
    masks = []
    for backend in ("triton", "cpu"):
        torch.manual_seed(5)
        key = torch.zeros(2, 2, 37, 1, dtype=dtype)
        out = relative_attention(x, key, value, None, None, query_start=0, dropout_p=0.3, backend=backend)
        masks.append(out != 0)
    assert torch.equal(*masks)
    assert torch.equal(masks[0], kept(2, 2, 19, 37, 0.3, seed=5))


@pytest.mark.parametrize("p", [1.0, 1.0 - 1e-13])
@pytest.mark.parametrize("name", ["left over right", "relations for batch", "mask: float inf"])
def test_dropout_of_everything_gives_zeros_and_zero_gradients(name: str, p: float) -> None:
    arguments = make(case(name))
    out, lse = attend("triton", arguments | {"dropout_p": p})
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, attend("triton", arguments)[1])
    for grad in torch.autograd.grad(out.sum(), [arguments[name] for name in TENSORS]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_no_dropout_draws_no_number_and_a_tiny_one_drops_nothing() -> None:
    arguments = make(case("left over right"))
    before = torch.get_rng_state()
    plain = relative_attention(**arguments, backend="triton")
    assert torch.equal(torch.get_rng_state(), before)
    found = relative_attention(**arguments, dropout_p=1e-12, backend="triton")
    torch.testing.assert_close(found, plain, atol=1e-11, rtol=0)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "compiled"])
@pytest.mark.parametrize("attention", [relative_attention, relation_attention])
def test_the_backward_pass_finds_the_mask_again(way: str, attention) -> None:
    labels = {"relations": "pairs"} if attention is relation_attention else {}
    arguments = make(Case("any", num_queries=35, batch=1, heads=1, tables="keys", **labels))
    value = arguments.pop("value")

    def call(value: Tensor) -> Tensor:
        query, key = arguments["query"], arguments["key"]
        rest = {name: x for name, x in arguments.items() if name not in ("query", "key")}
        return attention(query, key, value, **rest, dropout_p=0.5, backend="triton")

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
