"""Threads: PyTorch's own for small work on the CPU, and those whose forward passes sfi runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

# A model's changed modules compute as its own ones do where this is False: in other threads, which sfi does not serve.
served: ContextVar[bool] = ContextVar("served", default=False)

# One core reads this much in the time of a step's Python: below it more threads save nothing. And
# where other processes hold a core, every operation waits for the thread that has to share it.
SMALL_BYTES = 1 << 26


@contextmanager
def one_thread(*, wanted: bool) -> Iterator[None]:
    """Run the code inside on one thread if `wanted`; the setting is the whole process's."""
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def serving() -> Iterator[None]:
    """Let this thread's forward passes take the modules that sfi has changed."""
    before = served.set(True)
    try:
        yield
    finally:
        served.reset(before)
