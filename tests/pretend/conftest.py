"""Tests on devices that are not there need a machine where none is, Triton's interpreter and a C++ compiler."""

from collections.abc import Iterator

import pytest
import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.benchmarks.pretend.machine import load_guard, pretended
from kvbench.kernels.jit import triton


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Two pretended devices."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which no device can be pretended beside")
    if triton is None:
        pytest.skip("Triton is not installed")
    try:
        load_guard()
    except RuntimeError as error:
        pytest.skip(str(error))
    with pretended(2) as machine:
        yield machine
