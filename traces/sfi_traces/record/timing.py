"""Times spans: by CUDA events on a CUDA device, by the monotonic clock elsewhere."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

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
        self._sink, self._step = sink, 0
        device = torch.device(device)
        self._device = DeviceClock(device) if device.type == "cuda" else None
        self._origin = time.perf_counter_ns()
        self.mark: Callable[[], Any] = time.perf_counter_ns if self._device is None else self._device.mark

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
        return Span(self, key, moved_bytes)

    def read(self, mark: Any) -> tuple[float, str]:
        """Return when a mark passed, in microseconds since the clock began, and its stream; waits for the device."""
        if self._device is None:
            return (mark - self._origin) / 1e3, "main"
        event, stream, anchor = mark
        return anchor.until_us(event), stream


class Span:
    """A region between two marks."""

    __slots__ = ("_begin", "_bytes", "_end", "_key", "_observer")

    def __init__(self, observer: TimingObserver, key: Key, moved_bytes: int) -> None:
        self._observer, self._key, self._bytes = observer, key, moved_bytes

    def __enter__(self) -> None:
        """Mark where it begins."""
        self._begin = self._observer.mark()

    def __exit__(self, *_: object) -> None:
        """Mark where it ends."""
        self._end = self._observer.mark()
        self._observer.ended.append(self)

    def row(self) -> Row:
        """Return the span's row; waits for the device."""
        (begin_us, stream), (end_us, _) = map(self._observer.read, (self._begin, self._end))
        return (*self._key, stream, begin_us, end_us - begin_us, self._bytes or None)


class DeviceClock:
    """Records CUDA events as marks.

    `Event.elapsed_time` is float32, too coarse over a long run, so each step counts from an event of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, str] = {}
        self._anchor: Anchor | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Count from here on; steps begin on the main stream."""
        self._streams[torch.cuda.current_stream(self._device).cuda_stream] = "main"
        self._anchor = Anchor(self.mark()[0], self._anchor)

    def mark(self) -> tuple[torch.cuda.Event, str, "Anchor | None"]:
        """Record an event on the current stream; return it with the stream's name, and what it counts from."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        others = sum(name != "main" for name in self._streams.values())
        name = self._streams.setdefault(stream.cuda_stream, f"side {others}" if others else "side")
        return event, name, self._anchor


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
