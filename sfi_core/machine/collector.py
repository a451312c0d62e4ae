"""Python's garbage collector, kept away from a CUDA graph under way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now and none inside; the collector is as before afterwards.

    A CUDA graph that is freed while another one is captured makes the capture fail, and a graph in a circle
    of references is freed whenever the collector runs: torch.cuda.graph has not collected first since 2.9.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
