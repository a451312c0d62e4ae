"""PyTorch's threads for small work on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
