import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
