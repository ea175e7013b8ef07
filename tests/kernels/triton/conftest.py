import os
from pathlib import Path

import pytest
import torch

from kvcomp import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from .guard import install

    install()
elif not torch.cuda.is_available():
    collect_ignore_glob = ["*"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:  # NaN and overflow are wanted there
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"))


@pytest.fixture(autouse=True)
def definitions_are_definitions():
    ops.use_kernels(False)
    yield
    ops.use_kernels(True)


@pytest.fixture(autouse=True)
def new_memory_holds_nan():
    """Also the largest integer, so that an element that no kernel writes shows; PyTorch does it where it is told to be
    deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
