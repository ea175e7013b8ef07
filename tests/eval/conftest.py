import pytest
import torch
from reasoner import train


@pytest.fixture(scope="session")
def random_reasoner(tmp_path_factory):
    """The folder of a model with random weights, so large that every row matters; its words are those of the chains."""
    path, model = tmp_path_factory.mktemp("reasoner"), train.build()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    train.write(model, path, {})
    return path
