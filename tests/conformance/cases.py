"""The one list of cases that every backend runs, and how a case becomes tensors.

Widths are small and lengths are not: what goes wrong goes wrong at the ends of blocks.
"""

import math
import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from relpos import explain_backends, relation_attention, relative_attention
from relpos._inputs import check
from relpos.backends.arguments import arguments as operator_form

TENSORS = ("query", "key", "value", "rel_k", "rel_v")
# where attention runs; the numbers are drawn on the CPU, and are the same everywhere
DEVICE = torch.device(os.environ.get("RELPOS_TEST_DEVICE") or "cpu")


@dataclass(frozen=True)
class Case:
    """One way of calling attention; the defaults are the plainest."""

    name: str
    num_queries: int = 5
    num_keys: int | None = None  # as many as queries
    batch: int = 2
    heads: int = 2
    key_heads: int | None = None  # as many as heads
    d_k: int = 4
    d_v: int = 4
    left: int = 2
    right: int = 2
    tables: str = "both"  # both, keys, values, neither, tied
    is_per_head: bool = False
    query_start: int | tuple[int, ...] | None = None
    relations: str | None = None  # "pairs", "batch", "heads", "none": labels instead of distances
    mask: str | None = None  # see _mask
    key_lengths: tuple[int, ...] | None = None
    is_causal: bool = False
    scale: float | None = None
    layout: str = "contiguous"  # contiguous, transposed, expanded, strided

    def __str__(self) -> str:
        return self.name


CASES = (
    *(Case(f"length {n}", num_queries=n, batch=1, left=16, right=16) for n in (1, 2, 17, 63, 128, 257)),
    *(
        Case(f"length {n}, causal", num_queries=n, batch=1, left=3, right=3, is_causal=True)
        for n in (1, 2, 63, 128)
    ),
    *(Case(f"length {n} about k = 4", num_queries=n, left=4, right=4) for n in (4, 5, 6)),
    Case("length 257, key lengths", num_queries=257, left=8, right=8, key_lengths=(200, 256)),
    Case("more keys than queries", num_queries=3, num_keys=17, query_start=9),
    Case("more queries than keys", num_queries=17, num_keys=3, query_start=0),
    Case("one query at the end of a cache", num_queries=1, num_keys=63, query_start=62, is_causal=True),
    Case(
        "chunk of a static cache",
        num_queries=4,
        num_keys=17,
        query_start=5,
        is_causal=True,
        key_lengths=(9, 9),
    ),
    Case("a start for each sequence", num_queries=3, num_keys=9, query_start=(0, 6)),
    Case("a start for each sequence, causal", num_queries=3, num_keys=9, query_start=(6, 2), is_causal=True),
    Case("queries before all keys", num_queries=4, num_keys=6, query_start=-2),
    Case("queries before all keys, causal", num_queries=4, num_keys=6, query_start=-2, is_causal=True),
    Case("queries far before all keys", num_queries=4, num_keys=6, query_start=-30),
    Case("queries far after all keys", num_queries=4, num_keys=6, query_start=30),
    Case("left over right", num_queries=9, left=5, right=1),
    Case("right over left", num_queries=9, left=0, right=6),
    Case("left only, causal", num_queries=9, left=4, right=0, is_causal=True),
    Case("k = 0", left=0, right=0),
    Case("k = 0, causal, per head", left=0, right=0, is_causal=True, is_per_head=True),
    Case("k beyond the length", left=40, right=30),
    *(Case(f"tables: {tables}", tables=tables) for tables in ("keys", "values", "neither", "tied")),
    Case("tables: neither, k beyond the length", tables="neither", num_queries=9, left=40, right=30),
    *(
        Case(f"tables: {tables}, masked", tables=tables, mask="bool")
        for tables in ("keys", "values", "neither")
    ),
    Case("per head", is_per_head=True, heads=3, num_queries=17),
    Case("per head and tied", is_per_head=True, tables="tied", key_lengths=(3, 5)),
    Case("values per head only", is_per_head=True, tables="values"),
    Case("grouped heads", heads=6, key_heads=2, num_queries=17, mask="bool"),
    Case("one key head", heads=4, key_heads=1, is_per_head=True, is_causal=True),
    Case("grouped heads, a start each", heads=4, key_heads=2, num_queries=2, num_keys=7, query_start=(5, 1)),
    Case("values wider than keys", d_k=3, d_v=7),
    Case("values narrower than keys, per head", d_k=8, d_v=1, is_per_head=True),
    *(
        Case(f"mask: {mask}", num_queries=6, mask=mask)
        for mask in ("full", "empty", "bool", "empty rows", "keys", "end", "heads", "plain", "scalar")
    ),
    *(
        Case(f"mask: {mask}", num_queries=6, mask=mask)
        for mask in ("float", "float inf", "float empty", "float min")
    ),
    Case(
        "mask at the end, lengths and causal", num_queries=17, mask="end", key_lengths=(2, 17), is_causal=True
    ),
    Case("mask, lengths and causal", num_queries=17, mask="bool", key_lengths=(9, 17), is_causal=True),
    Case(
        "float mask, lengths and causal", num_queries=17, mask="float inf", key_lengths=(9, 0), is_causal=True
    ),
    Case("no key exists", key_lengths=(0, 0)),
    Case("one sentence is empty", key_lengths=(0, 5)),
    Case("scale", scale=0.3),
    Case("scale is zero", scale=0.0),
    Case("scale is negative", scale=-1.0, is_causal=True),
    *(
        Case(f"layout: {layout}", num_queries=9, layout=layout, key_lengths=(4, 9))
        for layout in ("transposed", "expanded", "strided")
    ),
    Case(
        "layout: transposed, grouped, per head", layout="transposed", heads=4, key_heads=2, is_per_head=True
    ),
    Case("layout: expanded, no mask", layout="expanded"),
    Case("batch 0", batch=0),
    Case("batch 0, everything", batch=0, query_start=(), key_lengths=(), mask="keys", is_causal=True),
    Case("batch 0, grouped", batch=0, heads=4, key_heads=2, is_per_head=True),
    Case("length 0", num_queries=0),
    Case(
        "length 0, everything",
        num_queries=0,
        key_lengths=(0, 0),
        mask="keys",
        is_causal=True,
        is_per_head=True,
    ),
    Case("no query", num_queries=0, num_keys=4, query_start=4),
    Case("no key", num_queries=4, num_keys=0, query_start=0),
    Case("no key, masked", num_queries=4, num_keys=0, query_start=0, key_lengths=(0, 0), is_causal=True),
    *(
        Case(f"relations for {of}", num_queries=n, num_keys=m, relations=of, left=0, right=6)
        for of, n, m in (("pairs", 17, 17), ("batch", 5, 9), ("heads", 63, 7), ("none", 5, 5))
    ),
    *(Case(f"relations, length {n}", num_queries=n, relations="batch") for n in (1, 128, 257)),
    Case("relations, per head", num_queries=9, relations="heads", is_per_head=True, heads=3),
    Case("relations, one label", relations="pairs", left=0, right=0),
    Case("relations, tied", relations="pairs", tables="tied"),
    Case("relations, keys", relations="batch", tables="keys", mask="bool"),
    Case("relations, values", relations="batch", tables="values", d_v=7),
    Case("relations, neither", relations="none", tables="neither"),
    Case("relations, grouped heads, masked", relations="heads", heads=4, key_heads=2, mask="empty rows"),
    Case("relations, float mask and lengths", relations="batch", mask="float inf", key_lengths=(0, 4)),
    Case("relations, scale, strided", relations="batch", scale=-0.3, layout="strided"),
    Case("relations, batch 0", relations="batch", batch=0),
    Case("relations, length 0", relations="pairs", num_queries=0),
    Case("relations, no key", relations="pairs", num_queries=3, num_keys=0),
)


def case(name: str) -> Case:
    """The case of this name."""
    return next(x for x in CASES if x.name == name)


def make(case: Case, dtype: torch.dtype = torch.float64) -> dict:
    """The arguments of `relative_attention` or `relation_attention` for a case; the same every time."""
    generator = torch.Generator().manual_seed(1803)
    m = case.num_queries if case.num_keys is None else case.num_keys
    key_heads = case.heads if case.key_heads is None else case.key_heads
    labels = case.left + case.right + 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    arguments = {
        "query": _laid_out(draw(case.batch, case.heads, case.num_queries, case.d_k), case.layout),
        "key": _laid_out(draw(case.batch, key_heads, m, case.d_k), case.layout),
        "value": _laid_out(draw(case.batch, key_heads, m, case.d_v), case.layout),
    }
    heads = (case.heads,) if case.is_per_head else ()
    rel_k, rel_v = draw(*heads, labels, case.d_k), draw(*heads, labels, case.d_v)
    arguments["rel_k"] = rel_k if case.tables in ("both", "keys", "tied") else None
    arguments["rel_v"] = rel_v if case.tables in ("both", "values") else None
    if case.tables == "tied":
        arguments["rel_v"] = rel_k
    for x in arguments.values():
        if x is not None:
            x.requires_grad_()
    start, lengths = case.query_start, case.key_lengths
    arguments |= {
        "attn_mask": None if case.mask is None else _mask(case, m, generator, dtype).to(DEVICE),
        "key_lengths": None if lengths is None else integers(*lengths),
        "scale": case.scale,
    }
    if case.relations is not None:
        return arguments | {"relations": _relations(case, m, generator)}
    return arguments | {
        "max_distance": (case.left, case.right),
        "query_start": integers(*start) if isinstance(start, tuple) else start,
        "is_causal": case.is_causal,
    }


def integers(*numbers: int) -> Tensor:
    """Starts or lengths, [batch], where attention runs."""
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "transposed":  # as a projection leaves it: [batch, length, heads, dim] in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":  # one head for all
        return x[:, :1].detach().expand(x.shape)
    if layout == "strided":  # every other number of a wider tensor, and not from its beginning
        wide = x.new_full((*x.shape[:3], 2 * x.shape[3] + 1), math.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x


def _relations(case: Case, m: int, generator: torch.Generator) -> Tensor:
    b, h, n = case.batch, case.heads, case.num_queries
    shape = {"pairs": (n, m), "batch": (b, 1, n, m), "heads": (1, h, n, m), "none": ()}[case.relations]
    lowest = 0 if case.relations == "heads" else -1  # -1 is no relation
    highest = 0 if case.relations == "none" else case.left + case.right + 1
    dtype = torch.int64 if case.relations == "batch" else torch.int8
    return torch.randint(lowest, highest, shape, generator=generator).to(DEVICE, dtype)


def _mask(case: Case, m: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    b, h, n = case.batch, case.heads, case.num_queries

    def coin(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.6

    match case.mask:
        case "full":
            return torch.ones(b, h, n, m, dtype=torch.bool)
        case "empty":
            return torch.zeros(b, 1, n, m, dtype=torch.bool)
        case "bool":
            return coin(b, 1, n, m)
        case "empty rows":
            return coin(b, h, n, m) & coin(b, h, n, 1)
        case "keys":
            return coin(b, 1, 1, m)
        case "end":  # padding
            return torch.arange(m) < torch.randint(m + 1, (b, 1, 1, 1), generator=generator)
        case "heads":
            return coin(1, h, n, m)
        case "plain":
            return coin(n, m)
        case "scalar":
            return torch.tensor(True)
        case "float":
            return torch.randn(b, 1, n, m, generator=generator).to(dtype)
        case "float inf":
            mask = torch.randn(1, h, n, m, generator=generator).to(dtype)
            return mask.masked_fill(~(coin(n, m) & coin(n, 1)), -math.inf)
        case "float empty":
            return torch.full((n, m), -math.inf, dtype=dtype)
        case "float min":  # what other libraries write for -inf
            return torch.zeros(b, 1, 1, m, dtype=dtype).masked_fill(~coin(b, 1, 1, m), torch.finfo(dtype).min)
    raise AssertionError(case.mask)


def detached(arguments: dict, dtype: torch.dtype | None = None) -> dict:
    """The same arguments with tensors of their own to differentiate, converted where a dtype is given."""
    copies = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            if name == "rel_v" and x is arguments["rel_k"]:
                x = copies["rel_k"]
            elif name in TENSORS:
                x = x.detach().to(dtype or x.dtype).requires_grad_()
            elif x.is_floating_point():
                x = x.to(dtype or x.dtype)
        copies[name] = x
    return copies


def attend(backend: str, arguments: dict) -> tuple[Tensor, Tensor]:
    """(out, lse) of a backend; skips the test, with the reasons, where it does not take the arguments."""
    if backend != "reference":
        reasons = explain_backends(**arguments, return_lse=True)[backend]
        if reasons:
            pytest.skip(f"{backend}: {'; '.join(reasons)}")
    attention = relation_attention if "relations" in arguments else relative_attention
    return attention(**arguments, return_lse=True, backend=backend)


def operator_arguments(arguments: dict, dropout_p: float = 0.0) -> list:
    """The same as the operators of fused backends take them, with a scale of 0.5 and one seed."""
    taken = operator_form(check(**arguments | {"scale": 0.5}))
    seed = torch.tensor([7]) if dropout_p else None
    return [*taken._replace(seed=seed, dropout_p=dropout_p)]


def outcome(out: Tensor, lse: Tensor, arguments: dict) -> dict[str, Tensor]:
    """out, lse, and the gradient of each tensor for gradients of out and lse that are the same every time."""
    generator = torch.Generator().manual_seed(3155)
    grad_out, grad_lse = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (out, lse)
    )
    leaves = {name: arguments[name] for name in TENSORS if arguments[name] is not None}
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [grad_out, grad_lse], allow_unused=True)
    return {"out": out, "lse": lse} | {
        f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def plain_attention(arguments: dict) -> tuple[Tensor, Tensor]:
    """(out, lse) as one would write it, all in the dtype of the inputs: the measure of low precision."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    i = torch.arange(query.shape[2], device=query.device)[:, None]
    j = torch.arange(key.shape[2], device=query.device)
    rel_k, rel_v = arguments["rel_k"], arguments["rel_v"]
    if "relations" in arguments:
        labels, is_causal = arguments["relations"].long(), False
        assert labels.dim() == 2
        rel_k, rel_v = (F.pad(x, (0, 0, 0, 1)) for x in (rel_k, rel_v))
    else:
        (left, right), is_causal = arguments["max_distance"], arguments["is_causal"]
        assert arguments["query_start"] is None
        labels = (j - i).clamp(-left, right) + left
    scale = arguments["scale"] or 1 / math.sqrt(query.shape[3])
    logits = (query * scale) @ key.mT
    if rel_k is not None:
        a_k = rel_k[..., labels, :]  # [query, key, d_k], or [heads, query, key, d_k]
        logits = logits + torch.einsum(
            "bhnd,...nmd->bhnm" if a_k.dim() == 3 else "bhnd,hnmd->bhnm", query * scale, a_k
        )
    if is_causal:
        logits = logits.masked_fill(j > i, -math.inf)
    if arguments["key_lengths"] is not None:
        logits = logits.masked_fill(j >= arguments["key_lengths"][:, None, None, None], -math.inf)
    if arguments["attn_mask"] is not None:
        logits = logits + arguments["attn_mask"]
    weights = torch.softmax(logits, -1)
    out = weights @ value
    if rel_v is not None:
        a_v = rel_v[..., labels, :]
        out = out + torch.einsum("bhnm,nmd->bhnd" if a_v.dim() == 3 else "bhnm,hnmd->bhnd", weights, a_v)
    return out, torch.logsumexp(logits, -1)
