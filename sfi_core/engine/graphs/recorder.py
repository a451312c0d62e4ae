"""Records work on the device as a CUDA graph."""

import gc
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from sfi_core.errors import BackendError
from sfi_core.machine.private import Operators
from sfi_core.state.side_stream import stream_of

Work = Callable[[], None]
# does the work, at least once, and returns a function that repeats the device's part of it
Recorder = Callable[[Work], Work]
ADVICE = "use --set engine.graphs=false"


class CudaRecorder:
    """Records CUDA graphs; those of one run share a memory pool, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # of higher priority than the side stream
        self._stream = stream_of(device, "record", priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """See `Recorder`; raise `BackendError` for work that waits for the device or that CUDA refuses."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels, lets libraries allocate their workspaces, and connects ranks
            with refuse_waiting():
                work()
        outer.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: an observer's thread may wait for its own events meanwhile
        held = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with no_collection(), held:
                work()
        except RuntimeError as error:
            first, frames = str(error).strip().partition("\n")[0], reversed([*traceback.walk_tb(error.__traceback__)])
            raise BackendError(
                f"a decoding step must fit a CUDA graph, got {first!r} {asked_by(frames)}; {ADVICE}"
            ) from error
        return graph.replay


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """Raise `BackendError` behind a body whose operations waited for the device: a graph cannot hold them.

    The body ends first: other ranks wait for this one in the next collective.
    """
    before, thread, seen, waits = torch.cuda.get_sync_debug_mode(), get_ident(), Operators(), list[str]()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message) and get_ident() == thread:
            waits.append(f"{seen.last or 'a wait'} {asked_by(traceback.walk_stack(inspect.currentframe()))}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with seen:
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waits:
        raise BackendError(
            f"a decoding step must not wait for the device to run as a CUDA graph, got {waits[0]}; {ADVICE}"
        )


def asked_by(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Name the first module of a model among frames, innermost first, and its line."""
    for frame, line in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            file = Path(frame.f_code.co_filename).name
            return f"in {type(module).__name__} ({file}:{line})"
    return "outside the model's modules"


make_recorder: Callable[[torch.device], Recorder] = CudaRecorder


def can_record(device: torch.device) -> bool:
    """Say whether a device has CUDA graphs."""
    return device.type == "cuda"


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and none inside: freeing a CUDA graph makes the capture of another fail."""
    gc.collect()  # torch.cuda.graph has not since 2.9
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
