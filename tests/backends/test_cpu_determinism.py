"""The kernel's results are the same bits whenever and wherever they are computed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from conformance.cases import CASES, Case, attend, case, make, outcome
from relpos.backends.cpu import backend as cpu

pytestmark = pytest.mark.skipif(cpu.UNAVAILABLE is not None, reason=f"cpu: {cpu.UNAVAILABLE}")

LARGE = (
    Case("blocks of queries", num_queries=300, heads=3, left=16, right=5, d_k=20, d_v=33, is_causal=True),
    Case(
        "splits of the keys",
        num_queries=2,
        num_keys=5000,
        query_start=4000,
        left=70,
        right=70,
        d_k=16,
        d_v=16,
    ),
    Case("grouped", num_queries=140, heads=6, key_heads=2, is_per_head=True, key_lengths=(140, 77)),
    Case("labels", num_queries=140, heads=3, relations="batch", mask="bool"),
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_bits(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, x in truth.items():
        assert torch.equal(found[name], x), f"{name} differs by {(found[name] - x).abs().max()}"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("given", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_thread_or_several_give_the_same_bits(given: Case, dropout_p: float, dtype: torch.dtype) -> None:
    arguments = make(given, dtype) | {"dropout_p": dropout_p}
    outcomes = []
    for count in (1, 1, 2, 3, 2):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        outcomes.append(outcome(*attend("cpu", arguments), arguments))
    for found in outcomes[1:]:
        assert_same_bits(found, outcomes[0])


def only(arguments: dict, s: int, length: int | None = None) -> dict:
    """Sequence s alone, and only its first tokens where a length is given."""
    alone = {}
    for name, x in arguments.items():
        if name in ("query", "key", "value"):
            x = x.detach()[s : s + 1, :, :length].requires_grad_()
        elif name in ("key_lengths", "query_start", "attn_mask", "relations") and isinstance(x, Tensor):
            x = x[s : s + 1] if x.dim() in (1, 4) and len(x) > 1 else x
        alone[name] = x
    return alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("given", [*LARGE, *(x for x in CASES if x.batch == 2)], ids=str)
def test_a_sequence_alone_gives_the_bits_that_it_gives_in_a_batch(given: Case, dtype: torch.dtype) -> None:
    arguments = make(given, dtype)
    whole = outcome_of_ones(arguments)
    for s in range(given.batch):
        found = outcome_of_ones(only(arguments, s))
        assert_same_bits(found, {name: x[s : s + 1] for name, x in whole.items()})


@pytest.mark.parametrize("length", [4, 63, 64, 65, 67, 100, 128, 129])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_no_bit_of_a_sequence(length: int, is_causal: bool) -> None:
    arguments = make(
        Case(
            "any", num_queries=200, left=5, right=70, d_k=24, key_lengths=(length, 200), is_causal=is_causal
        ),
        torch.float32,
    )
    whole = outcome_of_ones(arguments, length)
    alone = only(arguments, 0, length) | {"key_lengths": None, "query_start": None}
    found = outcome_of_ones(alone)
    assert_same_bits(found, {name: x[:1, :, :length] for name, x in whole.items()})


@pytest.mark.parametrize("length", [3, 2047, 2048, 2049, 2100, 4096, 4097])
def test_an_over_allocated_cache_changes_no_bit_of_a_step(length: int) -> None:
    sizes = {"num_queries": 2, "num_keys": 5000, "batch": 1, "query_start": length - 2}
    arguments = make(Case("any", **sizes, is_causal=True, key_lengths=(length,)), torch.float32)
    whole = outcome_of_ones(arguments)
    alone = {name: x for name, x in arguments.items() if name != "key_lengths"}
    alone |= {x: alone[x].detach()[:, :, :length].requires_grad_() for x in ("key", "value")}
    found = outcome_of_ones(alone)
    assert_same_bits(found, {name: x[:, :, : found[name].shape[2]] for name, x in whole.items()})


def outcome_of_ones(arguments: dict, length: int | None = None) -> dict[str, Tensor]:
    """out, lse and gradients of query, key and value for ones as the gradients of the first queries."""
    out, lse = attend("cpu", arguments)
    total = out[:, :, :length].float().sum() + lse[:, :, :length][lse[:, :, :length].isfinite()].sum()
    names = ("query", "key", "value")
    grads = torch.autograd.grad(total, [arguments[x] for x in names])
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("tables", ["both", "neither"])
@pytest.mark.parametrize(
    ("queries", "keys", "padded_queries", "padded_keys"),
    [(2, 2, 30, 30), (3, 30, 10, 50), (3, 30, 70, 30), (50, 3000, 100, 3000), (1, 4097, 200, 5000)],
)
def test_more_queries_and_keys_beside_it_change_no_bit_of_a_query(
    queries: int, keys: int, padded_queries: int, padded_keys: int, tables: str
) -> None:
    sizes = {"num_queries": padded_queries, "num_keys": padded_keys, "left": 5, "right": 3, "tables": tables}
    padded = make(Case("any", batch=1, query_start=7, **sizes), torch.float32)
    alone = dict(padded)
    alone["query"] = padded["query"][:, :, :queries]
    alone |= {name: padded[name][:, :, :keys] for name in ("key", "value")}
    padded["key_lengths"] = torch.tensor([keys])
    found, truth = (attend("cpu", x) for x in (padded, alone))
    for x, y in zip(found, truth, strict=True):
        assert torch.equal(x[:, :, :queries], y)


def test_a_call_between_leaves_nothing_behind() -> None:
    arguments = make(case("length 257, key lengths"))
    truth = outcome(*attend("cpu", arguments), arguments)
    wide = make(
        Case("wide", num_queries=70, num_keys=70, d_k=300, d_v=200, relations="batch", left=0, right=600)
    )
    with torch.no_grad():
        for x in ("query", "key", "value", "rel_k", "rel_v"):
            wide[x].fill_(torch.nan)
    outcome(*attend("cpu", wide), wide)
    assert_same_bits(outcome(*attend("cpu", arguments), arguments), truth)
