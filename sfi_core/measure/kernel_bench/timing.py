"""Clocks: time every variant in turns in one process, each call with a cold cache.

Before each call, a buffer larger than the last-level cache is read (not written: the timed call would pay for
writing it back). On CUDA that keeps the GPU busy while the host enqueues events and the replay of the captured call.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sfi_core.engine.graphs.recorder import no_collection
from sfi_core.state.side_stream import stream_of

FLUSH_BYTES = 256 << 20
COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
COPIES, WARM_UP = 7, 2


class CpuClock:
    """The wall clock."""

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 4)

    def prepare(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Warm up."""
        return _warmed_up(call)

    def time(self, calls: list[Callable[[], Any]]) -> Iterator[float]:
        """Time each call once; yield each time before the next call."""
        for call in calls:
            self._flush.sum()
            began = time.perf_counter_ns()
            call()
            yield (time.perf_counter_ns() - began) / 1e3


class CudaClock(CpuClock):
    """CUDA events, around graph replays unless the calls wait for the device."""

    def __init__(self, device: torch.device, *, graphs: bool) -> None:
        self._device, self._graphs = device, graphs
        self._flush = torch.ones(FLUSH_BYTES // 4, device=device)

    def prepare(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Compile and warm up on a side stream, then capture."""
        if not self._graphs:
            return super().prepare(call)
        side = stream_of(self._device, "clock")
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            _warmed_up(call)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph):
            call()
        return graph.replay

    def time(self, calls: list[Callable[[], Any]]) -> Iterator[float]:
        """Time each call once; the host does not wait between calls."""
        pairs = []
        for call in calls:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.sum()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self._device)
        yield from (1e3 * begin.elapsed_time(end) for begin, end in pairs)


def clock_for(device: torch.device, backend: str) -> CpuClock:
    """Return the clock of a device; PyTorch's references cannot be captured: they wait for the device."""
    if device.type == "cuda":
        return CudaClock(device, graphs=backend == "triton")
    return CpuClock()


def copy_gb_per_s(device: torch.device, clock: CpuClock) -> float:
    """Measure the copy bandwidth, bytes read plus bytes written."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    call = _warmed_up(lambda: target.copy_(source))  # captured in a graph, it runs at 0.8 of its rate on an H100
    return 2 * source.nbytes / statistics.median(clock.time([call] * COPIES)) / 1e3


def _warmed_up(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(WARM_UP):
        call()
    return call


def floor_us(device: torch.device, clock: CpuClock) -> float:
    """Measure the time that the clock adds to every call, by a call that does almost nothing."""
    number = torch.ones(1, device=device)
    call = clock.prepare(lambda: number.add_(1))
    return statistics.median(clock.time([call] * COPIES))


def workspace_bytes(device: torch.device) -> int:
    """Return the memory that the clocks need."""
    return FLUSH_BYTES + 2 * COPY_BYTES[device.type]


def percentile(times_us: Sequence[float], percent: int) -> float:
    """Return a percentile, one of the times."""
    return sorted(times_us)[min(len(times_us) - 1, percent * len(times_us) // 100)]
