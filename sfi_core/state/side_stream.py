"""Work beside the main stream: jobs, in order, each after all that the main stream had been given before it."""

import threading
from collections.abc import Callable

import torch

_made = threading.local()


def stream_of(device: torch.device, role: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream of a role on a CUDA device, one per thread; a lower `priority` goes first."""
    # runs share it: PyTorch's allocator reuses freed memory on one stream only, and cuBLAS keeps a workspace for each
    streams: dict[tuple[str, str], torch.cuda.Stream] = _made.__dict__.setdefault("streams", {})
    key = (str(device), role)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]


RING_PLACES = 4  # how many layers maintenance may lag behind
Job = Callable[[], None]


class SideStream:
    """Runs each job at once, on the main stream; `SecondStream` runs jobs beside it."""

    places = 1  # jobs that may be under way

    def run(self, place: int, job: Job) -> None:
        """Run a job after all work that the main stream has been given so far."""
        job()

    def wait(self, place: int) -> None:
        """Let the main stream wait for the last job of a place."""

    def join(self) -> None:
        """Let the main stream wait for all jobs."""

    def again(self) -> "SideStream":
        """Return a side on the same stream with its own events, for a CUDA graph."""
        return self


class SecondStream(SideStream):
    """Runs jobs on a CUDA stream of the lowest priority, and keeps the events of a captured graph."""

    places = RING_PLACES

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._events: list[torch.cuda.Event] = []
        self._done: dict[int, torch.cuda.Event] = {}

    def run(self, place: int, job: Job) -> None:
        """See `SideStream`."""
        self._stream.wait_event(self._passed())
        with torch.cuda.stream(self._stream):
            job()
            self._done[place] = self._passed()

    def wait(self, place: int) -> None:
        """See `SideStream`."""
        if place in self._done:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done.pop(place))

    def join(self) -> None:
        """See `SideStream`."""
        for place in list(self._done):
            self.wait(place)
        if not torch.cuda.is_current_stream_capturing():
            self._events.clear()

    def again(self) -> "SecondStream":
        """See `SideStream`."""
        return SecondStream(self._stream)

    def _passed(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        if torch.cuda.is_current_stream_capturing():
            self._events.append(event)
        return event


def side_of(device: torch.device, *, overlap: bool, role: str = "maintenance") -> SideStream:
    """Return a second stream if `overlap` and the device has one."""
    if not has_side_stream(device, overlap=overlap):
        return SideStream()
    return SecondStream(stream_of(device, role))


def ring_places(device: torch.device, *, overlap: bool) -> int:
    """Return the `places` of what `side_of` would return."""
    return (SecondStream if has_side_stream(device, overlap=overlap) else SideStream).places


def has_side_stream(device: torch.device, *, overlap: bool) -> bool:
    """Say whether `side_of` returns a second stream."""
    return overlap and device.type == "cuda"
