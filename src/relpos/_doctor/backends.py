"""Which backend serves which attention: typical arguments, and the reasons against each backend."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relpos._dispatch import BackendTable
from relpos._doctor.check import NO_BREAK, Check, Problem, Result, Warn, run_check
from relpos._functional import explain_backends


class Case(NamedTuple):
    """Arguments of attention: sizes, and the names of the `options` to give."""

    batch: int = 4
    num_queries: int = 512
    num_keys: int = 512
    heads: int = 8
    heads_of_key: int = 8
    d_k: int = 64
    d_v: int = 64
    k: int = 16
    dtype: torch.dtype = torch.float32
    needs_grad: bool = True
    options: tuple[str, ...] = ()

    def explain(self, device: torch.device) -> BackendTable:
        """The reasons against each backend, as `explain_backends` gives them."""
        (query, key, value, rel_k, rel_v), options = self.arguments(device)
        return explain_backends(query, key, value, rel_k, rel_v, **options)

    def arguments(self, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Query, key, value, rel_k, rel_v, and keyword arguments. No value of a tensor is read."""
        shapes = (
            (self.batch, self.heads, self.num_queries, self.d_k),
            (self.batch, self.heads_of_key, self.num_keys, self.d_k),
            (self.batch, self.heads_of_key, self.num_keys, self.d_v),
            (2 * self.k + 1, self.d_k),
            (2 * self.k + 1, self.d_v),
        )
        make = partial(torch.empty, dtype=self.dtype, device=device, requires_grad=self.needs_grad)
        options = self._options(device)
        return tuple(make(shape) for shape in shapes), {name: options[name] for name in self.options}

    def _options(self, device: torch.device) -> dict[str, Any]:
        lengths = torch.full((self.batch,), self.num_keys // 2, device=device)
        return {
            "is_causal": True,
            "key_lengths": lengths,
            "attn_mask": torch.ones(self.num_queries, self.num_keys, dtype=torch.bool, device=device),
            "dropout_p": 0.1,
            "query_start": self.num_keys - self.num_queries,
            "relations": torch.zeros(self.num_queries, self.num_keys, dtype=torch.int64, device=device),
        }


COMMON = "4 x 512 tokens, 8 heads of 64, float32, k\u00a0=\u00a016, with gradients"

CASES = {
    "short sentences (64 x 32 tokens)": Case(batch=64, num_queries=32, num_keys=32),
    "512 tokens": Case(),
    "4,096 tokens": Case(batch=1, num_queries=4096, num_keys=4096),
    "without gradients": Case(needs_grad=False),
    "causal": Case(options=("is_causal",)),
    "padding (key_lengths)": Case(options=("key_lengths",)),
    "dense mask (attn_mask)": Case(options=("attn_mask",)),
    "dropout": Case(options=("dropout_p",)),
    "one query on a cache of 4,096": Case(
        num_queries=1, num_keys=4096, needs_grad=False, options=("query_start",)
    ),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float64": Case(dtype=torch.float64),
    "grouped heads (8 on 2)": Case(heads_of_key=2),
    "values narrower than keys": Case(d_v=32),
    "labelled relations": Case(options=("relations",)),
}


def attention_checks(devices: list[str]) -> dict[str, Check]:
    """One check for each device, which asks `explain_backends` about each case."""
    return {device: partial(_check_device, torch.device(device)) for device in devices}


def _check_device(device: torch.device, warn: Warn) -> Result:
    problems: list[Problem] = []
    answers = {
        name: run_check(f"{name} on {device}", partial(_explain, case, device), problems)
        for name, case in CASES.items()
    }
    for problem in problems:
        warn(*problem)
    unserved = [name for name, answer in answers.items() if answer.value.get("chosen", "") is None]
    if unserved:
        warn(f"On {device} no backend serves {', '.join(unserved)}.", "See the reasons above.")
    return Result({name: answer.value for name, answer in answers.items()}, _table(answers))


def _explain(case: Case, device: torch.device, warn: Warn) -> Result:
    table = case.explain(device)
    return Result({"chosen": table.chosen, "reasons": dict(table)}, str(table))


def _table(answers: dict[str, Result]) -> str:
    """Each distinct answer once, below the names of its cases."""
    cases: dict[str, list[str]] = {}
    for name, answer in answers.items():
        cases.setdefault(answer.text, []).append(name)
    blocks = []
    for text, names in cases.items():
        heading = "; ".join(name.replace(" ", NO_BREAK) for name in names)
        blocks.append("\n".join([heading, *(f"  {line}" for line in text.splitlines())]))
    return "\n\n".join(blocks)
