"""One record of arguments: the operators of every backend take it, and the functions of the door agree."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.skips import each_backend
from relpos import explain_backends, relation_attention, relative_attention
from relpos._functional import attention_with_weights
from relpos._inputs import check
from relpos.backends.arguments import Arguments, takes_arguments


@takes_arguments(num_results=1)
def record(*given: Any) -> Tensor:
    raise AssertionError(given)


ARGUMENTS = torch.library.infer_schema(record, mutates_args=()).split(") -> ")[0][1:].split(", ")


def declared(operator: str) -> list[str]:
    """The arguments in the schema of an operator, "Tensor query" and so on."""
    schema = str(getattr(torch.ops.relpos, operator).default._schema)
    return schema.split(") -> ")[0].split("(")[1].split(", ")


def test_a_schema_names_every_argument_of_the_record_with_its_type() -> None:
    assert [x.split()[1] for x in ARGUMENTS] == list(Arguments._fields)
    expected = {"Tensor value", "Tensor? rel_k", "SymInt start", "bool is_causal", "float scale"}
    assert expected < set(ARGUMENTS)


@pytest.mark.parametrize("backend", each_backend("dense"))
def test_operators_begin_with_the_arguments_of_the_record(backend: str) -> None:
    forward, backward = declared(backend), declared(f"{backend}_backward")
    assert forward[: len(ARGUMENTS)] == ARGUMENTS
    assert backward[: len(forward)] == forward


@pytest.mark.parametrize("backend", each_backend("dense"))
def test_a_backward_operator_takes_the_results_and_their_gradients(backend: str) -> None:
    results = getattr(torch.ops.relpos, backend).default._schema.returns
    names = [x.split()[1] for x in declared(f"{backend}_backward")[len(declared(backend)) :]]
    assert names[:2] == ["out", "lse"]
    assert names[len(results) :] == ["grad_out", "grad_lse", "needs"]


@pytest.mark.parametrize("function", [relative_attention, relation_attention])
def test_overloads_take_what_the_function_takes(function: Callable) -> None:
    expected = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    assert len(overloads) == 2
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        assert list(parameters) == list(expected)
        for name in set(expected) - {"return_lse"}:
            assert parameters[name] == expected[name]


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (explain_backends, set()),
        (relative_attention, {"relations"}),
        (attention_with_weights, {"relations", "return_lse"}),
        (relation_attention, {"max_distance", "query_start", "is_causal"}),
    ],
)
def test_the_door_takes_what_the_checks_take(function: Callable, missing: set[str]) -> None:
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("backend", None)
    checked = inspect.signature(check).parameters
    assert set(parameters) == set(checked) - missing
    for name in set(parameters) - {"relations"}:
        assert parameters[name] == checked[name]
