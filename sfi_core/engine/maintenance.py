"""The schedule of slow steps' selections: Selector, Top-K and pack on a second stream (Sec. 4.1), or together.

With a second stream a layer writes its evidence to a place of a ring of buffers, which the side stream reads before the
main stream writes it again; at the end of the pass the main stream waits for all jobs. Without one the evidence of
several layers may wait for one call of the Selector, whose sixty operations cost the same for ten short layers as for
one. The packed segment is read at the next step only.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from sfi_core.state.side_stream import Job, SideStream, has_side_stream, side_of, stream_of

# float32 numbers of evidence that layers work off together: on torch they halve the Selector's time; on Triton, 0.1 GB
ENOUGH, TOGETHER = 1 << 19, 1 << 25
Item = TypeVar("Item")


class Maintenance:
    """The side stream and the ring of buffers that it reads, or `together` items that wait, up to `enough` numbers."""

    def __init__(self, side: SideStream, *, together: bool = False, enough: int = TOGETHER) -> None:
        self.side, self.together, self._enough = side, together, enough
        # by place of the ring: evidence, and the job that reads it, or PyTorch's allocator would reuse its tensors
        self._buffers: list[torch.Tensor | None] = [None] * side.places
        self._jobs: list[Job | None] = [None] * side.places
        self._next = 0
        self._waiting: dict[Hashable, list[tuple[Any, int, Callable[[list[Any]], None]]]] = {}

    def room(self, numbers: int, device: torch.device) -> torch.Tensor:
        """Return a buffer of at least `numbers` float32 for the next item's evidence."""
        if self.together:
            return torch.empty(numbers, dtype=torch.float32, device=device)
        self.side.wait(self._next)
        self._jobs[self._next], buffer = None, self._buffers[self._next]
        if buffer is None or buffer.numel() < numbers:
            buffer = self._buffers[self._next] = torch.empty(numbers, dtype=torch.float32, device=device)
        return buffer

    def submit(
        self, item: Item, work: Callable[[list[Item]], None], *, alike: Hashable | None = None, numbers: int = 0
    ) -> None:
        """Work an item off on the side stream, which reads the last buffer of `room`, or with others of equal `alike`.

        Those wait until their `numbers` are enough, or for `join`, unless `alike` is None. The `work` of the first of a
        group is called with all of them, in order.
        """
        if self.together and alike is not None:
            waiting = self._waiting.setdefault(alike, [])
            waiting.append((item, numbers, work))
            if sum(size for _, size, _ in waiting) >= self._enough:
                self._work_off(alike)
            return
        place, self._next = self._next, (self._next + 1) % len(self._jobs)
        job = self._jobs[place] = partial(work, [item])
        self.side.run(place, job)

    def again(self) -> "Maintenance":
        """Return an empty maintenance of the same schedule, with events of its own."""
        return Maintenance(self.side.again(), together=self.together, enough=self._enough)

    def join(self) -> None:
        """Work off all waiting items, and let the main stream wait for all jobs."""
        for alike in list(self._waiting):
            self._work_off(alike)
        self.side.join()
        self._jobs = [None] * len(self._jobs)

    def drop(self) -> None:
        """Discard the waiting items of a step that broke off, and let the main stream wait for all jobs."""
        self._waiting.clear()
        self.join()

    def _work_off(self, alike: Hashable) -> None:
        waiting = self._waiting.pop(alike)
        work = waiting[0][2]
        work([item for item, _, _ in waiting])


def schedule(device: torch.device, backend: str, *, overlap: bool) -> Maintenance:
    """Return a run's schedule: a second stream on a CUDA device with `overlap`; else, and on torch, layers together."""
    if backend == "torch" or not overlap:
        return Maintenance(SideStream(), together=True, enough=ENOUGH if backend == "torch" else TOGETHER)
    return Maintenance(side_of(device, overlap=overlap))


def worked_off_together(numbers: int, layers: int, backend: str) -> int:
    """Return how many layers' evidence is held at once, if each layer's has `numbers` logits."""
    return min(layers, -(-(ENOUGH if backend == "torch" else TOGETHER) // numbers))


@contextmanager
def main_stream(device: torch.device, *, overlap: bool) -> Iterator[None]:
    """Run the body on a stream of higher priority than the side stream; the default stream has the lowest."""
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
