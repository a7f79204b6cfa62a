"""What the tests share: fresh memory that holds NaN, and the names of the backends."""

from collections.abc import Iterator

import pytest
import torch

from relpos.backends import BACKENDS


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


@pytest.fixture(params=[backend.name for backend in BACKENDS] + ["reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend, and of the reference, in turn."""
    return request.param
