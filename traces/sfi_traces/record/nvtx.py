"""NVTX ranges in the domain "sfi" for Nsight Systems: one for each run, step of the batch, and span."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sfi_core.observers.events import BeginStepEvent, RunEvent, StepEvent
from sfi_core.observers.observer import EVERY_SPAN, NOTHING, SPANS, NullObserver

GREY = 0xFF8D99AE  # of spans
COLORS = {"prefill step": 0xFF3A7CA5, "fast step": 0xFF2E9E5B, "slow step": 0xFFD1495B, "mixed step": 0xFFEDAE49}


class NvtxObserver(NullObserver):
    """Marks runs, steps and spans for an attached profiler; without one it does nothing.

    Runs and steps are start/end ranges, since a span may begin before a step and end within it; spans are
    push/pop ranges. A step's message is its kind alone, so that profilers group by it. A step that gives no token
    (drafting) ends where the next one begins. Without a profiler it wants nothing.
    """

    def __init__(self, *, spans: bool | None = None) -> None:
        """Look for a profiler; `spans` as of `ParquetObserver`."""
        self._domain = _domain()
        if self._domain is None:
            self.wants = frozenset()
        elif not spans:
            self.wants = type(self).wants - ({EVERY_SPAN} if spans is None else {SPANS, EVERY_SPAN})
        self._known: dict[str, Any] = {}
        self._run: int | None = None
        self._range: int | None = None
        self._left = 0

    def close(self) -> None:
        """Close the run's range, and a step's that an error left open."""
        self._end_step()
        if self._run is not None:
            self._domain.end_range(self._run)
            self._run = None

    def on_run(self, event: RunEvent) -> None:
        """Close the run before, and open this one."""
        self.close()
        if self._domain is not None:
            self._run = self._domain.start_range(self._about(f"run {event.policy}"))

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Open the batch's step."""
        if self._domain is None:
            return
        self._end_step()
        self._left = len(event.slow) + len(event.fast)
        self._range = self._domain.start_range(self._about(f"{event.kind} step"))

    def on_step(self, event: StepEvent) -> None:
        """Close the batch's step with its last request."""
        self._left -= 1
        if self._left == 0:
            self._end_step()

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Bracket a region with a range."""
        return self._pushed(self._about(name)) if SPANS in self.wants else NOTHING

    @contextmanager
    def _pushed(self, attributes: Any) -> Iterator[None]:
        self._domain.push_range(attributes)
        try:
            yield
        finally:
            self._domain.pop_range()

    def _end_step(self) -> None:
        if self._range is not None:
            self._domain.end_range(self._range)
            self._range = None

    def _about(self, message: str) -> Any:
        if message not in self._known:  # registered once
            self._known[message] = self._domain.get_event_attributes(message, COLORS.get(message, GREY))
        return self._known[message]


def _domain() -> Any:
    try:  # None without a profiler
        import nvtx  # noqa: PLC0415 - a machine without it decodes as well
    except ImportError:
        return None
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain("sfi")
    return domain if isinstance(domain, nvtx.Domain) else None
