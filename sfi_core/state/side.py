"""Work beside the main stream: jobs that run in order, and two rules that make them safe.

A job sees what the main stream was asked to do before the job was handed over; the main stream waits for a
job where it needs what the job does.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from sfi_core.state.streams import stream_of

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

    Every event is recorded once. One that is part of a captured graph lives as long as this.
    """

    places = RING_PLACES

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
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
        return SecondStream(self._stream)

    def _passed(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        if torch.cuda.is_current_stream_capturing():
            self._events.append(event)
        return event


def side_of(device: torch.device, *, overlap: bool, role: str = "maintenance") -> Side:
    """Return a second stream where there is one and it is wanted; `role` as `stream_of` has it."""
    if not has_side_stream(device, overlap=overlap):
        return InOrder()
    return SecondStream(stream_of(device, role))


def ring_places(device: torch.device, *, overlap: bool) -> int:
    """Return the places of `side_of`'s side, without making one."""
    return (SecondStream if has_side_stream(device, overlap=overlap) else InOrder).places


def has_side_stream(device: torch.device, *, overlap: bool) -> bool:
    """Say whether maintenance runs on a stream of its own."""
    return overlap and device.type == "cuda"
