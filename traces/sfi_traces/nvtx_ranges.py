"""Ranges for Nsight Systems: the domain "sfi", a range for every step of the batch and one for every span."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy as np

from sfi_core.observer import NOTHING, BeginStepEvent, NullObserver, RunEvent, StepEvent

DOMAIN = "sfi"
PAYLOAD = np.dtype([("step", np.int32), ("layer", np.int32)])  # layer -1 for what is not a layer's
GREEN, RED, AMBER, BLUE = 0xFF2E9E5B, 0xFFD1495B, 0xFFEDAE49, 0xFF3A7CA5
PURPLE, GREY = 0xFF7B5EA7, 0xFF8D99AE
STEPS = {"prefill": BLUE, "fast": GREEN, "slow": RED, "mixed": AMBER}  # a step's color by its kind
PHASES = {  # a span's category and color
    "prefill": ("forward", BLUE),
    "forward": ("forward", BLUE),
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
    """Tells an attached profiler of steps and spans; does nothing where there is none.

    Steps are start/end ranges, because what drives the model may open a span before a step and close it
    within; spans are push/pop ranges. A step's message says its kind only, so that a profiler's statistics
    group by it; the number is in the payload.
    """

    def __init__(self) -> None:
        self._domain = _domain()
        self._attributes: dict[str, Any] = {}
        self._step = 0
        self._open: int | None = None
        self._left = 0

    @staticmethod
    def attached() -> bool:
        """Say whether a profiler listens."""
        return _domain() is not None

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the step that an error left open."""
        self.close()

    def close(self) -> None:
        """Close the step that is open."""
        if self._open is not None:
            self._domain.end_range(self._open)
            self._open = None

    def on_run(self, event: RunEvent) -> None:
        """Close what an interrupted run left open."""
        self.close()

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Open the batch's step."""
        if self._domain is None:
            return
        self.close()
        self._step, self._left = event.step, len(event.slow) + len(event.fast)
        attributes = self._attribute(f"{event.kind} step", event.kind, STEPS[event.kind])
        attributes.payload = np.array((event.step, -1), PAYLOAD)
        self._open = self._domain.start_range(attributes)

    def on_step(self, event: StepEvent) -> None:
        """Close the batch's step with its last request."""
        self._left -= 1
        if self._left == 0:
            self.close()

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Bracket a region with a range."""
        if self._domain is None:
            return NOTHING
        attributes = self._attribute(name, *PHASES.get(name, OTHER))
        return _Range(self._domain, attributes, (self._step, -1 if layer is None else layer))

    def _attribute(self, message: str, category: str, color: int) -> Any:
        if message not in self._attributes:
            self._attributes[message] = self._domain.get_event_attributes(message, color, category)
        return self._attributes[message]


class _Range:
    __slots__ = ("_attributes", "_domain", "_payload")

    def __init__(self, domain: Any, attributes: Any, payload: tuple[int, int]) -> None:
        self._domain, self._attributes, self._payload = domain, attributes, payload

    def __enter__(self) -> None:
        self._attributes.payload = np.array(self._payload, PAYLOAD)
        self._domain.push_range(self._attributes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._domain.pop_range()


def _domain() -> Any:
    # the domain, or None where nobody listens
    try:
        import nvtx  # noqa: PLC0415 - optional
    except ImportError:
        return None
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain(DOMAIN)
    return domain if isinstance(domain, nvtx.Domain) else None
