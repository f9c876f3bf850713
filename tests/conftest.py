import os

import pytest
import torch

# JAX compiles in two thirds of the time without most optimisations; it reads this when it is imported.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from browser import browser as browser


def pytest_collection_modifyitems(items):
    """Skips tests marked ``gpu`` where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
