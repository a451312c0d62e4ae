"""Python's garbage collector, kept away while a CUDA graph is captured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and none inside.

    Freeing a CUDA graph during the capture of another makes the capture fail, and the collector frees graphs
    in circles of references: torch.cuda.graph has not collected first since 2.9.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
