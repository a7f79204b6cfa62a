"""Each package offers the names in its `__all__` and no others."""

import types

import pytest

import relpos
import relpos.inspection
import relpos.nn


@pytest.mark.parametrize("package", [relpos.nn, relpos.inspection], ids=lambda package: package.__name__)
def test_a_package_offers_the_names_that_it_lists_alone(package: types.ModuleType) -> None:
    assert {name for name in vars(package) if not name.startswith("_")} == set(package.__all__)


def test_relpos_offers_the_names_that_it_lists_and_submodules_that_were_imported() -> None:
    public = {name: value for name, value in vars(relpos).items() if not name.startswith("_")}
    # Python adds each submodule that something imports
    submodules = {
        name for name, value in public.items() if getattr(value, "__name__", "") == f"relpos.{name}"
    }
    assert set(relpos.__all__) - {"__version__"} <= set(public)
    assert set(public) - set(relpos.__all__) <= submodules


def test_decompose_is_offered_as_a_module() -> None:
    assert relpos.decompose.decompose.__module__ == "relpos.decompose"
