"""CUDA streams and events without a device: which accesses to memory nothing orders."""

import threading
from contextlib import contextmanager

import torch

from sfi_core.state import side_stream


class Device:
    """CUDA streams and events as vector clocks: who is known to have come before whom."""

    def __init__(self) -> None:
        self.device = "cuda:0"
        self.dropped: tuple[str, ...] = ()
        self.main, self.made = Stream(self, "main"), 0
        self.now = [self.main]
        self.accesses: list[tuple[int, str, bool, int, dict[str, int]]] = []

    def install(self, monkeypatch) -> None:
        monkeypatch.setattr(side_stream, "_made", threading.local())  # the fakes are this test's
        for name, value in {
            "Stream": lambda *_, priority: Stream(self, "side"),
            "Event": Event,
            "current_stream": lambda _: self.now[-1],
            "stream": self.inside,
            "is_current_stream_capturing": lambda: False,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def inside(self, stream):
        self.now.append(stream)
        yield
        self.now.pop()

    def touch(self, place: int, *, write: bool) -> None:
        stream = self.now[-1]
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        count = stream.clock[stream.name]
        self.accesses.append((place, stream.name, write, count, dict(stream.clock)))

    def races(self) -> list[tuple[str, str]]:
        """Return pairs of accesses to a place, one of them a write, that nothing orders."""
        pairs = []
        for number, (place, stream, write, count, _) in enumerate(self.accesses):
            for other, later, rewrite, _, clock in self.accesses[number + 1 :]:
                if place == other and (write or rewrite) and clock.get(stream, 0) < count:
                    pairs.append((stream, later))
        return pairs


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.clock = device, name, {}

    def wait_event(self, event: "Event") -> None:
        if self.name not in self.device.dropped:
            for name, count in event.clock.items():
                self.clock[name] = max(count, self.clock.get(name, 0))

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)
