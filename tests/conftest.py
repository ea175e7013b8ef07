import pytest
import torch

from kvcomp.models import SMOLLM2, load


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct and its tokenizer; nobody may change them."""
    return load(SMOLLM2)


@pytest.fixture(autouse=True)
def one_thread_without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
