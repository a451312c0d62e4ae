"""Maintenance beside the next layers: Selector, Top-K and pack of a slow step on a second stream (Sec. 4.1).

A layer hands its evidence over in one of a ring of places. Two rules make that safe: the side reads a place
only once the main stream has written it, and the main stream writes a place again only once the side has read
it. At the end of the pass the main stream waits for all jobs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

RING_PLACES = 4  # layers that maintenance may lag behind
Job = Callable[[], None]


class Side(Protocol):
    """Runs jobs, one after the other.

    Attributes:
        places: Jobs that may be under way.
    """

    places: int

    def run(self, place: int, job: Job) -> None:
        """Run a job once the main stream has done what it was asked to so far."""

    def wait(self, place: int) -> None:
        """Hold the main stream until the last job of a place is done."""

    def join(self) -> None:
        """Hold the main stream until all jobs are done."""

    def again(self) -> "Side":
        """Return one like it, with events of its own, for a graph to hold."""


class InOrder:
    """Runs a job at once, on the main stream."""

    places = 1

    def run(self, place: int, job: Job) -> None:
        """See `Side`."""
        job()

    def wait(self, place: int) -> None:
        """See `Side`: it is done."""

    def join(self) -> None:
        """See `Side`: they are done."""

    def again(self) -> "InOrder":
        """See `Side`."""
        return self


class SecondStream:
    """Runs jobs on a CUDA stream of the lowest priority.

    Every event is recorded once, and lives as long as this: one that is part of a captured graph must.
    """

    places = RING_PLACES

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._events: list[torch.cuda.Event] = []
        self._done: dict[int, torch.cuda.Event] = {}

    def run(self, place: int, job: Job) -> None:
        """See `Side`."""
        self._stream.wait_event(self._passed())
        with torch.cuda.stream(self._stream):
            job()
            self._done[place] = self._passed()

    def wait(self, place: int) -> None:
        """See `Side`."""
        if place in self._done:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done.pop(place))

    def join(self) -> None:
        """See `Side`."""
        for place in list(self._done):
            self.wait(place)
        if not torch.cuda.is_current_stream_capturing():
            self._events.clear()

    def again(self) -> "SecondStream":
        """See `Side`."""
        return SecondStream(self._stream.device, self._stream)

    def _passed(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        self._events.append(event)
        return event


@dataclass(slots=True)
class RingPlace:
    """A place of the ring.

    Attributes:
        buffer: Evidence logits, float32, flat; grows to what layers ask for.
        job: What reads it, kept with all its tensors: PyTorch's allocator knows no reader on another stream.
    """

    buffer: torch.Tensor | None = None
    job: Job | None = None


class Maintenance:
    """The ring of places, and the side that works through it.

    Attributes:
        side: Runs the jobs.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._ring = [RingPlace() for _ in range(side.places)]
        self._next = 0

    def room(self, numbers: int, device: torch.device) -> torch.Tensor:
        """Return a buffer of at least `numbers` float32, for the main stream to fill for the next job."""
        place = self._ring[self._next]
        self.side.wait(self._next)
        place.job = None
        if place.buffer is None or place.buffer.numel() < numbers:
            place.buffer = torch.empty(numbers, dtype=torch.float32, device=device)
        return place.buffer

    def submit(self, job: Job) -> None:
        """Let the side run a job, which reads the buffer that `room` returned last."""
        place, self._next = self._next, (self._next + 1) % len(self._ring)
        self._ring[place].job = job
        self.side.run(place, job)

    def again(self) -> "Maintenance":
        """Return an empty one like it."""
        return Maintenance(self.side.again())

    def join(self) -> None:
        """Let the main stream wait for all jobs."""
        self.side.join()
        for place in self._ring:
            place.job = None


def side_of(device: torch.device, *, overlap: bool) -> Side:
    """Return a second stream where there is one and it is wanted."""
    return SecondStream(device) if has_side_stream(device, overlap=overlap) else InOrder()


def ring_places(device: torch.device, *, overlap: bool) -> int:
    """Return the places of `side_of`'s side, without making one."""
    return (SecondStream if has_side_stream(device, overlap=overlap) else InOrder).places


def has_side_stream(device: torch.device, *, overlap: bool) -> bool:
    """Say whether maintenance runs on a stream of its own."""
    return overlap and device.type == "cuda"


@contextmanager
def main_stream(device: torch.device, *, overlap: bool) -> Iterator[None]:
    """Run what is inside on a stream of higher priority than the side's, after what came before.

    The default stream's priority is the lowest there is, so that nothing could give way to it.
    """
    if not has_side_stream(device, overlap=overlap):
        yield
        return
    outer = torch.cuda.current_stream(device)
    inner = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    inner.wait_stream(outer)
    try:
        with torch.cuda.stream(inner):
            yield
    finally:
        outer.wait_stream(inner)
