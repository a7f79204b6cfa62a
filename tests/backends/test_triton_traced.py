"""torch.compile sees the Triton kernels in the operators, and no input that they would write to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relpos.backends.triton import backend as triton

pytestmark = pytest.mark.skipif(triton.UNAVAILABLE is not None, reason=f"triton: {triton.UNAVAILABLE}")


def test_torch_traces_the_operators_down_to_kernels_that_write_to_no_input() -> None:
    program = Path(__file__).with_name("traced_triton.py")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    counts = found["kernels"]
    assert set(counts) == {"distances", "starts and lengths", "labels", "bool mask", "float mask", "dropout"}
    # the four of the backward pass, and that of tables for each of the two
    assert all(count == [1, 5] for count in counts.values())
    # one graph serves every batch and length
    assert found["guards"] == []
    # where torch cannot read a kernel it says so, and takes every tensor for one that is written to
    assert "assuming every input is mutated" not in ended.stderr
