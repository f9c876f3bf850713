import pytest
import torch

from browser import browser as browser  # a fixture for all tests


def pytest_collection_modifyitems(items):
    """Skips tests marked ``gpu`` where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
