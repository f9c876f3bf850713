"""How many threads torch works on: small matrices are faster on one, where more threads only wait for each other."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

ONE_THREAD_ROWS = 20_000  # largest number of rows whose products are computed on one thread


class _Callers:
    """How many callers want one thread at this moment, in the process and in this thread; and the process's own number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.threads_before = 1
        self.depth = threading.local()  # torch keeps a number of threads for each thread of Python


_callers = _Callers()


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Runs torch on one thread in this thread of Python; the number of before comes back at the end."""
    callers = _callers
    if not wanted:
        yield
        return
    depth = getattr(callers.depth, "value", 0)
    with callers.lock:
        if callers.count == 0:
            callers.threads_before = torch.get_num_threads()
        callers.count += 1
        if depth == 0:
            torch.set_num_threads(1)
    callers.depth.value = depth + 1
    try:
        yield
    finally:
        callers.depth.value = depth
        with callers.lock:
            callers.count -= 1
            if depth == 0 and callers is _callers:  # not in a process that was forked meanwhile
                torch.set_num_threads(callers.threads_before)


def _forget_callers() -> None:
    """Starts anew in a forked process, where no other thread is left; one of them may have held the lock."""
    global _callers
    _callers = _Callers()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_callers)
