"""What must happen before any test module is imported."""

import contextlib
import importlib
import os
import sys

import hypothesis
import pytest
import torch

# Triton fixes at its own first import whether its library functions are interpreted, and transformers imports it. The
# variable goes again at once: children that tests start must not see it. On a GPU the kernels run as they are.
if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]

# On CI the examples are the same in every run; elsewhere hypothesis looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """No test's random numbers depend on which tests ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items) -> None:
    """The chain first: it takes longest, and everything else fits beside it on the other worker."""
    items.sort(key=lambda item: item.get_closest_marker("chain") is None)
