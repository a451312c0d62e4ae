"""NVTX ranges in the domain "sfi" for Nsight Systems: one for each run, step of the batch, and span."""

from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_core.observers.events import BeginStepEvent, RunEvent, StepEvent
from sfi_core.observers.observer import EVERY_SPAN, NOTHING, SPANS, NullObserver

DOMAIN = "sfi"
Array = npt.NDArray[Any]
RUN = np.dtype([("batch", np.int32)])
STEP = np.dtype(  # slow and fast: requests; moved_bytes: bytes of K and V that attention will read
    [("step", np.int32), ("slow", np.int32), ("fast", np.int32), ("cached_tokens", np.int32), ("moved_bytes", np.int64)]
)
SPAN = np.dtype([("step", np.int32), ("layer", np.int32)])  # layer -1: outside of layers
GREEN, RED, AMBER, BLUE = 0xFF2E9E5B, 0xFFD1495B, 0xFFEDAE49, 0xFF3A7CA5
PURPLE, GREY = 0xFF7B5EA7, 0xFF8D99AE
KINDS = {"prefill": BLUE, "fast": GREEN, "slow": RED, "mixed": AMBER}  # a step's color by its kind
PHASES = {  # a span's category and color
    "prefill": ("forward", BLUE),
    "forward": ("forward", BLUE),
    "ahead": ("forward", BLUE),
    "attention.fast": ("attention", GREEN),
    "attention.dense": ("attention", RED),
    "attention.mixed": ("attention", AMBER),
    "select_before": ("refresh", PURPLE),
    "selector": ("refresh", PURPLE),
    "top_k": ("refresh", PURPLE),
    "pack": ("refresh", PURPLE),
}
OTHER = ("other", GREY)


class NvtxObserver(NullObserver):
    """Marks runs, steps and spans for an attached profiler; without one it does nothing.

    Runs and steps are start/end ranges, since a span may begin before a step and end within it; spans are
    push/pop ranges. A step's message is its kind alone, so that profilers group by it; its number is in the
    payload. A step that gives no token (drafting) ends where the next one begins.

    With `spans` it marks spans in every step, so that none is replayed as a CUDA graph; None marks those of steps that
    are not replayed, False none. Without a profiler it wants nothing.
    """

    def __init__(self, *, spans: bool | None = None) -> None:
        """Look for a profiler."""
        self._domain = _domain()
        if self._domain is None:
            self.wants = frozenset()
        elif not spans:
            self.wants = type(self).wants - ({EVERY_SPAN} if spans is None else {SPANS, EVERY_SPAN})
        self._known: dict[str, tuple[Any, Array]] = {}
        self._run: int | None = None
        self._range: int | None = None
        self._step = self._left = 0

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""
        self.close()

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
            attributes, payload = self._about(f"run {event.policy}", "run", GREY, RUN)
            payload[()] = (event.batch,)
            self._run = self._domain.start_range(attributes)

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Open the batch's step."""
        if self._domain is None:
            return
        self._end_step()
        slow, fast = len(event.slow), len(event.fast)
        self._step, self._left = event.step, slow + fast
        kind = event.kind
        attributes, payload = self._about(f"{kind} step", f"{kind} steps", KINDS[kind], STEP)
        payload[()] = (event.step, slow, fast, event.cached_tokens, event.moved_bytes)
        self._range = self._domain.start_range(attributes)

    def on_step(self, event: StepEvent) -> None:
        """Close the batch's step with its last request."""
        self._left -= 1
        if self._left == 0:
            self._end_step()

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Bracket a region with a range."""
        if SPANS not in self.wants:
            return NOTHING
        attributes, payload = self._about(name, *PHASES.get(name, OTHER), SPAN)
        place = (self._step, -1 if layer is None else layer)
        return _Range(self._domain, attributes, payload, place)

    def _end_step(self) -> None:
        if self._range is not None:
            self._domain.end_range(self._range)
            self._range = None

    def _about(self, message: str, category: str, color: int, kind: np.dtype[Any]) -> tuple[Any, Array]:
        # registered once: the profiler reads the payload in place when a range begins; a new payload for each
        # range would cost more than the range itself
        if message not in self._known:
            payload = np.zeros((), kind)
            attributes = self._domain.get_event_attributes(message, color, category, payload)
            self._known[message] = attributes, payload
        return self._known[message]


class _Range:
    __slots__ = ("_attributes", "_domain", "_payload", "_place")

    def __init__(self, domain: Any, attributes: Any, payload: Array, place: tuple[int, int]) -> None:
        self._domain, self._attributes = domain, attributes
        self._payload, self._place = payload, place

    def __enter__(self) -> None:
        self._payload[()] = self._place
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()


def _domain() -> Any:
    try:  # None without a profiler
        import nvtx  # noqa: PLC0415 - a machine without it decodes as well
    except ImportError:
        return None
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain(DOMAIN)
    return domain if isinstance(domain, nvtx.Domain) else None
