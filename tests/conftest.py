import pytest
import torch

from browser import browser as browser  # a fixture for all tests


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
