"""What the tests share: memory that holds NaN, backends, small recipes, one model that learned numbers."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if os.environ.get("RELPOS_TEST_DEVICE") == "cuda":
    # cuBLAS is deterministic with memory of this size, read when its first product is taken
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # Triton's kernels are interpreted on the CPU, which is decided when they are defined
    os.environ["TRITON_INTERPRET"] = "1"

from conformance.skips import each_backend
from relpos.backends.cpu import backend as cpu
from small_runs import read_metrics, small_values

if TYPE_CHECKING:
    from relpos.translation.recipe import Recipe

if os.environ.pop("TRITON_INTERPRET", None):
    # what Triton asks later is told to this process alone: commands that tests start find what users have
    with suppress(ImportError):
        from triton import knobs

        knobs.propagate_env = False
        knobs.runtime.interpret = True

pytest_plugins = ["required", "interpreter"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a device on which nothing would run, and every test be skipped."""
    device = os.environ.get("RELPOS_TEST_DEVICE") or "cpu"
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"RELPOS_TEST_DEVICE must be cpu or cuda; got {device!r}. Unset it for cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"RELPOS_TEST_DEVICE=cuda needs a GPU and torch for CUDA; torch {torch.__version__} has none. "
            "Unset it for cpu."
        )


# the tensors of tests are small, and threads that wait for each other are slow where the cores are busy
torch.set_num_threads(1)


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """Memory that an operator forgets to write reads as NaN."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    is_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
    torch.use_deterministic_algorithms(was_deterministic, warn_only=is_warn_only)


@pytest.fixture(params=[*each_backend(), "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend, and of the reference, in turn."""
    return request.param


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the kernel of the backend `cpu` was not built."""
    monkeypatch.setattr(cpu, "UNAVAILABLE", "was not built")


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]


@pytest.fixture(name="small_values")
def small_values_of_a_recipe() -> dict[str, Any]:
    """The values of the small recipe, to be changed."""
    return small_values()


@pytest.fixture
def small_recipe() -> "Callable[..., Recipe]":
    """Make the small recipe, with changes to its section `training`."""
    # the translator needs more than attention does, and tests of attention run without it
    from relpos.translation.recipe import check_recipe

    return lambda **training: check_recipe(small_values(**training), "small")


@pytest.fixture
def small_file(tmp_path: Path) -> Callable[..., Path]:
    """Write the small recipe, with changes to its section `training`, and return its path."""

    from relpos.translation.recipe import check_recipe, write_recipe

    def write(**training: Any) -> Path:
        path = tmp_path / "small.yaml"
        write_recipe(check_recipe(small_values(**training), "small"), path)
        return path

    return write


@pytest.fixture
def metrics() -> Callable[[Path, str], dict[int, float]]:
    """Read logged values of a run."""
    return read_metrics


@pytest.fixture
def command() -> Callable[..., subprocess.Popen]:
    """Start `relpos` in a process of its own."""

    def start(*arguments: object, before: str = "", **options: Any) -> subprocess.Popen:
        code = f"{before}\nimport sys\nfrom relpos.cli import run\nsys.exit(run(sys.argv[1:]))"
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            **options,
        )

    return start


@pytest.fixture(scope="session")
def numbers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that learned lines of one to three numbers below a hundred."""
    from filelock import FileLock

    from relpos.translation.recipe import check_recipe
    from relpos.translation.training import train

    lines = {"shortest": 1, "longest": 3, "largest": 99}
    values = small_values()
    values["data"] = {
        "train": [{"numbers": {"lines": 8000, **lines, "seed": 1}}],
        "validation": [{"numbers": {"lines": 200, **lines, "seed": 2, "part": "heldout"}}],
        "test": [{"numbers": {"lines": 300, **lines, "seed": 3, "part": "heldout"}}],
    }
    values["model"] = {
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_heads": 4,
        "d_ff": 128,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "relative_max_distance": 8,
    }
    values["training"] = {
        "updates": 900,
        "tokens_per_batch": 1024,
        "warmup": 150,
        "label_smoothing": 0.0,
        "evaluate_every": 150,
        "log_every": 100,
        "validation_pairs": 100,
        "best": "chrf",
        "average": 3,
        "learning_rate_scale": 0.6,
    }
    # processes of pytest-xdist share a folder, and one of them trains
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with FileLock(folder / "numbers.lock"):
        if not (folder / "numbers" / "model").exists():
            train(check_recipe(values, "numbers"), folder / "numbers")
    return folder / "numbers"
