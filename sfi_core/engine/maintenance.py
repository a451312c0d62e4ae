"""Maintenance beside the next layers: Selector, Top-K and pack of a slow step on a second stream (Sec. 4.1).

A layer hands its evidence over in one of a ring of places. Two rules make that safe: the side reads a place
only once the main stream has written it, and the main stream writes a place again only once the side has read
it. At the end of the pass the main stream waits for all jobs.

Where there is no second stream, what a layer hands over may wait for what the next layers hand over, so that
one call serves several: the Selector's sixty operations cost as much for ten layers of a short context as for
one.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.state.side import Job, Side, has_side_stream
from sfi_core.state.streams import stream_of

# float32 numbers that are worked off together: a layer then costs the Selector half of what it costs alone
ENOUGH = 1 << 19
# float32 logits of the prompts whose first selections share their launches: those of a long one take 0.1 GB
TOGETHER = 1 << 25


@dataclass(slots=True)
class RingPlace:
    """A place of the ring.

    Attributes:
        buffer: Evidence logits, float32, flat; grows to what layers ask for.
        job: What reads it, kept with all its tensors: PyTorch's allocator knows no reader on another stream.
    """

    buffer: torch.Tensor | None = None
    job: Job | None = None


@dataclass(slots=True)
class Waiting:
    """What layers have handed over to be worked off together.

    Attributes:
        work: Takes all of it.
        items: What was handed over, in order.
        numbers: How many numbers that is.
    """

    work: Callable[[list[Any]], None]
    items: list[Any] = field(default_factory=list)
    numbers: int = 0


class Maintenance:
    """The ring of places, the side that works through it, and what waits to be worked off together.

    Attributes:
        side: Runs the jobs.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._ring = [RingPlace() for _ in range(side.places)]
        self._next = 0
        self._waiting: dict[Hashable, Waiting] = {}

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

    def collect(
        self, alike: Hashable, item: Any, numbers: int, work: Callable[[list[Any]], None]
    ) -> None:
        """Let an item wait for others, and work them off together: once they are enough, or at `join`.

        Args:
            alike: What items that go together have in common.
            item: The item.
            numbers: How many numbers it holds.
            work: Takes the items, in order; the first item's is called for all.
        """
        waiting = self._waiting.setdefault(alike, Waiting(work))
        waiting.items.append(item)
        waiting.numbers += numbers
        if waiting.numbers >= ENOUGH:
            self._work_off(alike)

    def again(self) -> "Maintenance":
        """Return an empty one like it."""
        return Maintenance(self.side.again())

    def join(self) -> None:
        """Work off what waits, and let the main stream wait for all jobs."""
        for alike in list(self._waiting):
            self._work_off(alike)
        self.side.join()
        for place in self._ring:
            place.job = None

    def drop(self) -> None:
        """Let the main stream wait for all jobs of a step that broke off; what waits is not worked off."""
        self._waiting.clear()
        self.join()

    def _work_off(self, alike: Hashable) -> None:
        waiting = self._waiting.pop(alike)
        waiting.work(waiting.items)


def first_together(numbers: int) -> int:
    """Return how many first selections share their launches, where the logits of each are so many numbers."""
    return max(1, TOGETHER // numbers)


def worked_off_together(numbers: int, layers: int) -> int:
    """Return of how many layers evidence waits, where a layer's holds so many numbers."""
    return min(layers, -(-ENOUGH // numbers))


@contextmanager
def main_stream(device: torch.device, *, overlap: bool) -> Iterator[None]:
    """Run what is inside on a stream of higher priority than the side's, after what came before.

    The default stream's priority is the lowest there is, so that nothing could give way to it.
    """
    if not has_side_stream(device, overlap=overlap):
        yield
        return
    outer = torch.cuda.current_stream(device)
    inner = stream_of(device, "main", priority=-1)
    inner.wait_stream(outer)
    try:
        with torch.cuda.stream(inner):
            yield
    finally:
        outer.wait_stream(inner)
