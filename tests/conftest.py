import os

import pytest
import torch

# JAX compiles in two thirds of the time without most optimisations; it reads this when it is imported.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from browser import browser as browser

# The files that take longest begin first, so that the processes of `make test` end together.
LONGEST_FILES = "docs estimators nuts images process toys cli_models kernels attach datasets uci".split()


def pytest_collection_modifyitems(items):
    """Brings the longest files to the front, and skips tests marked ``gpu`` where torch sees no GPU."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # stable: the order within a file stays
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
