"""The benchmarks run, and measure what they say; their figures are nobody's test."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/training.py as a module, with one small size."""
    spec = importlib.util.spec_from_file_location("training_benchmark", FOLDER / "training.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.SIZES["small"] = {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16}
    return module


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_training_benchmark_compares_three_models_in_the_precision_it_names(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    seen: dict[str, set[torch.dtype]] = {}
    make = training._models

    def watched(*arguments: object) -> dict[str, torch.nn.Module]:
        models = make(*arguments)
        for kind, model in models.items():
            linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
            linear.register_forward_hook(
                lambda _module, _inputs, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype)
            )
        return models

    monkeypatch.setattr(training, "_models", watched)
    options = argparse.Namespace(tokens=256, vocabulary=400, longest=2, turns=1, threads=1)
    record = training.measure("small", precision, options)
    assert set(record["target_tokens_per_second"]) == {"relative", "sinusoidal", "marian"}
    assert record["relative_to_marian"] > 0
    assert all(dtypes == {dtype} for dtypes in seen.values())
    assert "marian" in seen
