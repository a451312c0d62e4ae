"""Times spans: by CUDA events on a CUDA device, by the monotonic clock elsewhere."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sfi_core.observers.events import BeginStepEvent, RunEvent
from sfi_core.observers.observer import AHEAD, NullObserver

# a row of the table `timings`: request, step, layer, name, stream, begin_us, elapsed_us, bytes
Row = tuple[int, int, int | None, str, str, float, float, int | None]
Key = tuple[int, int, int | None, str]


class TimingObserver(NullObserver):
    """Times every span, also one that ends in an error.

    On a CUDA device a span lasts from when the device reaches its beginning to when it reaches its end.
    Nothing waits for the device until the rows are read.
    """

    def __init__(self, device: torch.device | str, sink: Callable[[Sequence["Span"]], None]) -> None:
        """Start a device's clock; `sink` takes a step's spans when the next begins."""
        self.ended: list[Span] = []
        self._sink = sink
        device = torch.device(device)
        self._clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self._request = self._requests = self._step = 0

    def on_run(self, event: RunEvent) -> None:
        """Number the requests of this run after those of the last."""
        self.flush()
        self._request += self._requests
        self._requests = event.requests

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Hand over the spans of the step before."""
        self.flush()
        self._step = event.step
        self._clock.begin_step()

    def flush(self) -> None:
        """Hand over the spans that have ended."""
        if self.ended:
            self._sink(self.ended)
            self.ended = []

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Time a region; a pass launched ahead counts as the next step's `forward`."""
        key = (self._request, self._step, layer, name)
        if name == AHEAD:
            key = (self._request, self._step + 1, layer, "forward")
        return Span(self, key, moved_bytes, self._clock)


class Span:
    """A timed region."""

    __slots__ = ("_begin", "_bytes", "_clock", "_end", "_key", "_observer")
    _begin: Any  # marks of the clock
    _end: Any

    def __init__(self, observer: TimingObserver, key: Key, moved_bytes: int, clock: "HostClock | DeviceClock") -> None:
        self._observer, self._key, self._bytes, self._clock = observer, key, moved_bytes, clock

    def __enter__(self) -> None:
        """Mark where it begins."""
        self._begin = self._clock.mark()

    def __exit__(self, *_: object) -> None:
        """Mark where it ends."""
        self._end = self._clock.mark()
        self._observer.ended.append(self)

    def row(self) -> Row:
        """Return the span's row; waits for the device."""
        return (*self._key, *self._clock.measure(self._begin, self._end), self._bytes or None)


class HostClock:
    """Marks times of the host, in nanoseconds."""

    mark = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self._origin = self.mark()

    def begin_step(self) -> None:
        """Count on."""

    def measure(self, begin: int, end: int) -> tuple[str, float, float]:
        """Return the stream, the microseconds from the clock's beginning to `begin`, and those to `end`."""
        return "main", (begin - self._origin) / 1e3, (end - begin) / 1e3


Mark = tuple["Anchor", torch.cuda.Event, str]  # what the event counts from, the event, its stream's name


class DeviceClock:
    """Marks CUDA events.

    `Event.elapsed_time` is float32, too coarse over a long run, so each step counts from an event of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, str] = {}
        self._anchor: Anchor | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Count from here on; steps begin on the main stream."""
        stream = torch.cuda.current_stream(self._device)
        self._streams[stream.cuda_stream] = "main"
        self._anchor = Anchor(_recorded(stream), self._anchor)

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            others = sum(name != "main" for name in self._streams.values())
            self._streams[stream.cuda_stream] = f"side {others}" if others else "side"
        assert self._anchor is not None, "the clock runs"
        return self._anchor, _recorded(stream), self._streams[stream.cuda_stream]

    def measure(self, begin: Mark, end: Mark) -> tuple[str, float, float]:
        """Do as the host's clock; waits for the device."""
        anchor, first, stream = begin
        begin_us = anchor.until_us(first)
        return stream, begin_us, anchor.until_us(end[1]) - begin_us


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Anchor:
    """An event that later events count from."""

    def __init__(self, event: torch.cuda.Event, before: "Anchor | None") -> None:
        self._event, self._before = event, before
        self._at_us = 0.0

    def at_us(self) -> float:
        """Return when the event passed; waits for it."""
        if self._before is not None:
            self._at_us, self._before = self._before.until_us(self._event), None
        return self._at_us

    def until_us(self, event: torch.cuda.Event) -> float:
        """Return when another event passed; waits for both."""
        self._event.synchronize()
        event.synchronize()
        passed_us: float = self._event.elapsed_time(event) * 1e3
        return self.at_us() + passed_us
