"""How many threads work: small matrices are faster on one, for more only wait for each other."""

import contextlib
import threading
from collections.abc import Iterator

import torch

ONE_THREAD_ROWS = 20_000  # products over up to so many rows are made on one thread

_lock = threading.Lock()
_inside = 0  # how many callers want one thread at this moment
_before = 1  # the process's own number of threads, while there are any


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Torch on one thread for a while, in the whole process; its own number comes back when the last caller leaves."""
    global _inside, _before
    if not wanted:
        yield
        return
    with _lock:
        if _inside == 0:
            _before = torch.get_num_threads()
            torch.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.set_num_threads(_before)
