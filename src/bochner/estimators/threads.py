"""How many threads work: small matrices are faster on one, for more only wait for each other."""

import contextlib
from collections.abc import Iterator

import torch

ONE_THREAD_ROWS = 20_000  # products over up to so many rows are made on one thread


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Torch on one thread for a while; the process's own number comes back afterwards."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
