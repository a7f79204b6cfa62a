"""One record of arguments: the operators of every backend, and the signatures of the door, say the same."""

import inspect
import sys
import typing
from collections.abc import Callable

import pytest
import torch

from conformance.skips import required
from relpos import functional
from relpos.backends import cpu, triton
from relpos.backends.arguments import NUM_ARGUMENTS, Arguments, takes_arguments


def declared(operator: str) -> list[str]:
    """The arguments in the schema of an operator, "Tensor query" and so on."""
    return [str(x) for x in getattr(torch.ops.relpos, operator).default._schema.arguments]


@takes_arguments(num_results=1)
def like_no_operator(*given: object) -> tuple[torch.Tensor]:
    raise AssertionError(given)


ARGUMENTS = torch.library.infer_schema(like_no_operator, mutates_args=()).split(" -> ")[0][1:-1].split(", ")
NAMES = {"cpu": cpu.UNAVAILABLE, "triton": triton.UNAVAILABLE, "merged": None}


def test_a_schema_has_every_argument_of_the_record_in_its_order() -> None:
    assert [x.split()[1] for x in ARGUMENTS] == list(Arguments._fields)
    assert ARGUMENTS[:4] == ["Tensor query", "Tensor key", "Tensor value", "Tensor? rel_k"]
    assert {"SymInt start", "bool is_causal", "float scale"} < set(ARGUMENTS)
