"""How many threads torch works on: small matrices are faster on one, where more threads only wait for each other."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

ONE_THREAD_ROWS = 20_000  # largest number of rows whose products are computed on one thread


class _Threads:
    """How many callers want one thread at this moment, and the process's own number of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.callers = 0
        self.before = 1


_threads = _Threads()


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Runs torch on one thread, in the whole process; its earlier number of threads comes back when the last caller leaves."""
    threads = _threads
    if not wanted:
        yield
        return
    with threads.lock:
        if threads.callers == 0:
            threads.before = torch.get_num_threads()
            torch.set_num_threads(1)
        threads.callers += 1
    try:
        yield
    finally:
        with threads.lock:
            threads.callers -= 1
            if threads.callers == 0 and threads is _threads:  # not in a process that was forked meanwhile
                torch.set_num_threads(threads.before)


def _forget_callers() -> None:
    """Starts anew in a forked process, where no other thread is left; one of them may have held the lock."""
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_callers)
