"""Times spans: by CUDA events on a CUDA device, by the monotonic clock elsewhere."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from sfi_core.observers.events import BeginStepEvent
from sfi_core.observers.observer import AHEAD, NullObserver

# of a row of the table `timings`: step, layer, name, stream, begin_us, elapsed_us, bytes
Row = tuple[int, int | None, str, str, float, float, int | None]
Key = tuple[int, int | None, str]


class TimingObserver(NullObserver):
    """Times every span, also one that ends in an error.

    On a CUDA device a span lasts from when the device reaches its beginning to when it reaches its end.
    Nothing waits for the device until the rows are read.
    """

    def __init__(self, device: torch.device | str, sink: Callable[[Sequence["Span"]], None]) -> None:
        """Start a device's clock; `sink` takes a step's spans when the next begins."""
        self.ended: list[Span] = []
        self._sink = sink
        self._clock = time.perf_counter_ns()
        device = torch.device(device)
        self._device = DeviceClock(device) if device.type == "cuda" else None
        self._step = 0

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Hand over the spans of the step before."""
        self.flush()
        self._step = event.step
        if self._device is not None:
            self._device.begin_step()

    def flush(self) -> None:
        """Hand over the spans that have ended."""
        if self.ended:
            self._sink(self.ended)
            self.ended = []

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Time a region; a pass launched ahead counts as the next step's `forward`."""
        key = (self._step + 1, layer, "forward") if name == AHEAD else (self._step, layer, name)
        if self._device is None:
            return HostSpan(self, key, moved_bytes, self._clock)
        return DeviceSpan(self, key, moved_bytes, self._device)


class HostSpan:
    """A region timed by the host's clock."""

    __slots__ = ("_begin", "_bytes", "_end", "_key", "_observer", "_origin")

    def __init__(self, observer: TimingObserver, key: Key, moved_bytes: int, origin: int) -> None:
        self._observer, self._key, self._bytes, self._origin = observer, key, moved_bytes, origin

    def __enter__(self) -> None:
        """Note when it begins."""
        self._begin = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        """Note when it ends."""
        self._end = time.perf_counter_ns()
        self._observer.ended.append(self)

    def row(self) -> Row:
        """Return the span's row."""
        begin_us, elapsed_us = (self._begin - self._origin) / 1e3, (self._end - self._begin) / 1e3
        return (*self._key, "main", begin_us, elapsed_us, self._bytes or None)


class DeviceClock:
    """Tells when CUDA events passed, in microseconds since the clock was made.

    `Event.elapsed_time` is float32, too coarse over a long run, so each step counts from an event of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {torch.cuda.current_stream(device).cuda_stream: "main"}
        self.anchor = Anchor(self.record()[0], None)

    def begin_step(self) -> None:
        """Count from here on; steps begin on the main stream."""
        self._streams[torch.cuda.current_stream(self._device).cuda_stream] = "main"
        self.anchor = Anchor(self.record()[0], self.anchor)

    def record(self) -> tuple[torch.cuda.Event, str]:
        """Record an event on the current stream; return it with the stream's name."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        others = sum(name != "main" for name in self._streams.values())
        return event, self._streams.setdefault(stream.cuda_stream, f"side {others}" if others else "side")


class Anchor:
    """An event that later events count from."""

    def __init__(self, event: torch.cuda.Event, before: "Anchor | None") -> None:
        self._event, self._before = event, before
        self._at_us = 0.0

    def until_us(self, event: torch.cuda.Event) -> float:
        """Return when another event passed; waits for both."""
        self._event.synchronize()
        event.synchronize()
        if self._before is not None:
            self._at_us, self._before = self._before.until_us(self._event), None
        return self._at_us + float(self._event.elapsed_time(event)) * 1e3


class DeviceSpan:
    """A region timed by the device, between two events on a stream."""

    __slots__ = ("_anchor", "_begin", "_bytes", "_clock", "_end", "_key", "_observer", "_stream")

    def __init__(self, observer: TimingObserver, key: Key, moved_bytes: int, clock: DeviceClock) -> None:
        self._observer, self._key, self._bytes, self._clock = observer, key, moved_bytes, clock

    def __enter__(self) -> None:
        """Mark where it begins."""
        self._anchor = self._clock.anchor
        self._begin, self._stream = self._clock.record()

    def __exit__(self, *_: object) -> None:
        """Mark where it ends."""
        self._end = self._clock.record()[0]
        self._observer.ended.append(self)

    def row(self) -> Row:
        """Return the span's row; waits for the device."""
        begin_us, end_us = self._anchor.until_us(self._begin), self._anchor.until_us(self._end)
        return (*self._key, self._stream, begin_us, end_us - begin_us, self._bytes or None)


Span = HostSpan | DeviceSpan
