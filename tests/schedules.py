"""Schedules that a second stream may choose, for tests: when the jobs beside the main stream run."""

import random
from contextlib import contextmanager

from sfi_core.state.side_stream import RING_PLACES
from tests.fakes import RecordingObserver


class Lazy:
    """The laziest schedule: a job runs once somebody waits for it."""

    places = RING_PLACES

    def __init__(self) -> None:
        self.pending = []
        self.most = 0

    def run(self, slot: int, job) -> None:
        self.pending.append((slot, job))
        self.most = max(self.most, len(self.pending))

    def wait(self, slot: int) -> None:
        while any(place == slot for place, _ in self.pending):
            self.one()

    def join(self) -> None:
        while self.pending:
            self.one()

    def one(self) -> None:
        _, job = self.pending.pop(0)
        job()


class AnyTime(Lazy):
    """A schedule that the second stream may choose: it looks up at every span of the main stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.busy = False

    def look(self) -> None:
        if self.pending and not self.busy and self.chance.random() < 0.3:
            self.one()

    def one(self) -> None:
        self.busy = True
        super().one()
        self.busy = False


class Watching(RecordingObserver):
    """Lets the side look up whenever the main stream does something."""

    def __init__(self, side) -> None:
        super().__init__()
        self.side = side

    @contextmanager
    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0):
        if isinstance(self.side, AnyTime):
            self.side.look()
        with super().span(name, layer, moved_bytes):
            yield
