"""How a piece of work is recorded as a CUDA graph, and which devices can."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from sfi_core.errors import BackendError
from sfi_core.machine.collector import no_collection
from sfi_core.machine.private import LastOperation
from sfi_core.state.streams import stream_of

Work = Callable[[], None]
ADVICE = "use --set engine.graphs=false"


class Recorder(Protocol):
    """Records what some work asks of the device."""

    def __call__(self, work: Work) -> Work:
        """Do the work, at least once, and return what does the device's part of it again.

        Raises:
            BackendError: It waits for the device, or CUDA refuses the capture; the work has been done.
        """


class CudaRecorder:
    """Records CUDA graphs, all of one run in one memory pool: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # what gives way to this one's kernels is on the side's stream, of the lowest priority
        self._stream = stream_of(device, "record", priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """See `Recorder`."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            work()  # compiles every kernel, and makes what libraries keep for later
            with refuse_waiting():
                work()
        outer.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads, an observer's, may wait for their own events meanwhile
        held = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with no_collection(), held:
                work()
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendError(
                f"a decoding step must fit a CUDA graph, got {first!r} {asked_by(error)}; {ADVICE}"
            ) from error
        return graph.replay


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """Refuse what waits for the device inside, which no graph can hold.

    Raises:
        BackendError: Something does; the message names the operation, and the module that asks for it.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    last = LastOperation()
    try:
        with last:
            yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise BackendError(
            "a decoding step must not wait for the device to run as a CUDA graph, got "
            f"{last.name or 'a wait'} {asked_by(error)}; {ADVICE}"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def asked_by(error: BaseException) -> str:
    """Name the innermost module of a model that an error came through, and its line."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            file = Path(frame.f_code.co_filename).name
            return f"in {type(module).__name__} ({file}:{line})"
    return "outside the model's modules"


def make_recorder(device: torch.device) -> Recorder:
    """Return a recorder for a device."""
    return CudaRecorder(device)


def can_record(device: torch.device) -> bool:
    """Say whether a device has graphs."""
    return device.type == "cuda"
