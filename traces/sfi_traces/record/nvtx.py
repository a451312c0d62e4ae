"""NVTX ranges in the domain "sfi" for Nsight Systems: one for each run, step of the batch, and span."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from sfi_core.observers.events import BeginStepEvent, RunEvent, StepEvent
from sfi_core.observers.observer import EVERY_SPAN, NOTHING, SPANS, NullObserver

GREY = 0xFF8D99AE  # of spans
COLORS = {"prefill step": 0xFF3A7CA5, "fast step": 0xFF2E9E5B, "slow step": 0xFFD1495B, "mixed step": 0xFFEDAE49}


class NvtxObserver(NullObserver):
    """Marks runs, steps and spans for an attached profiler; without one it does nothing.

    Runs and steps are start/end ranges, since a span (push/pop) may begin before a step and end within it. A step's
    message is its kind alone, so that profilers group by it. A step that gives no token (drafting) ends where the next
    one begins. Without a profiler it wants nothing.
    """

    def __init__(self, *, spans: bool | None = None) -> None:
        """Look for a profiler; `spans` as of `ParquetObserver`."""
        self._domain = _domain()
        if self._domain is None:
            self.wants = frozenset()
        else:
            self._attributes = cache(self._domain.get_event_attributes)  # registered once
            if not spans:
                self.wants = type(self).wants - ({EVERY_SPAN} if spans is None else {SPANS, EVERY_SPAN})
        self._open: dict[str, int] = {}  # ranges: "run" and "step"
        self._left = 0

    def close(self) -> None:
        """Close the run's range, and a step's that an error left open."""
        self._end("step")
        self._end("run")

    def on_run(self, event: RunEvent) -> None:
        """Close the run before, and open this one."""
        self.close()
        self._start("run", f"run {event.policy}")

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Open the batch's step."""
        self._left = len(event.slow) + len(event.fast)
        self._start("step", f"{event.kind} step")

    def on_step(self, event: StepEvent) -> None:
        """Close the batch's step with its last request."""
        self._left -= 1
        if self._left == 0:
            self._end("step")

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Bracket a region with a range."""
        return self._pushed(name) if SPANS in self.wants else NOTHING

    @contextmanager
    def _pushed(self, name: str) -> Iterator[None]:
        self._domain.push_range(self._attributes(name, GREY))
        try:
            yield
        finally:
            self._domain.pop_range()

    def _start(self, kind: str, message: str) -> None:
        self._end(kind)
        if self._domain is not None:
            self._open[kind] = self._domain.start_range(self._attributes(message, COLORS.get(message, GREY)))

    def _end(self, kind: str) -> None:
        if kind in self._open:
            self._domain.end_range(self._open.pop(kind))


def _domain() -> Any:
    try:  # None without a profiler
        import nvtx  # noqa: PLC0415 - a machine without it decodes as well
    except ImportError:
        return None
    domain = nvtx.get_domain("sfi") if nvtx.enabled() else None
    return domain if isinstance(domain, nvtx.Domain) else None
