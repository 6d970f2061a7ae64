"""Kernel tests run in Triton's interpreter, on a CPU, with uninitialised memory filled with NaN."""

import pytest
import torch


@pytest.fixture
def interpreter(monkeypatch):
    """Kernels imported in this test run in the interpreter (see tests/conftest.py for the library's half)."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter's tests are for machines without a GPU; tests/gpu runs the kernels themselves")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def poisoned():
    """`torch.empty` gives NaN, or the largest integer: an output that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
