"""What the core tells the outside world. The core knows no observer but this protocol."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from sfi_core.observers.events import (
    AuditEvent,
    BeginStepEvent,
    Event,
    LogitsEvent,
    PromptEvent,
    RecallEvent,
    RunEvent,
    SelectionEvent,
    StepEvent,
    VerificationEvent,
)

NOTHING = nullcontext()
HANDLERS: dict[type[Event], str] = {
    RunEvent: "on_run",
    PromptEvent: "on_prompt",
    BeginStepEvent: "on_begin_step",
    StepEvent: "on_step",
    VerificationEvent: "on_verification",
    SelectionEvent: "on_selection",
    RecallEvent: "on_recall",
    AuditEvent: "on_audit",
    LogitsEvent: "on_logits",
}


class Observer(Protocol):
    """Receives events and brackets spans; must not change what the core computes."""

    def on(self, event: Event) -> None:
        """Take note of an event; an observer may see several runs, one after the other."""

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Bracket a region, for NVTX ranges and timings; `moved_bytes` is what it has to move."""


class NullObserver:
    """Observes nothing, at no cost; a base for observers that want some events only.

    An observer overrides the methods of the events that it wants, or `on` for all of them.

    Attributes:
        listened: Whether anybody takes what the observer passes on; otherwise it wants nothing.
    """

    listened = True

    def on(self, event: Event) -> None:
        """Hand the event to its own method."""
        getattr(self, HANDLERS[type(event)])(event)

    def on_run(self, event: RunEvent) -> None:
        """A run begins."""

    def on_prompt(self, event: PromptEvent) -> None:
        """A piece of the prompts is about to be read."""

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """A step begins."""

    def on_step(self, event: StepEvent) -> None:
        """One step of one request is over."""

    def on_verification(self, event: VerificationEvent) -> None:
        """A pass of a lossless run has verified what a request drafted."""

    def on_selection(self, event: SelectionEvent) -> None:
        """The selected memory of one request and layer was refreshed."""

    def on_recall(self, event: RecallEvent) -> None:
        """One layer of one request fetched rows from the host."""

    def on_audit(self, event: AuditEvent) -> None:
        """One layer of an audited step has attended."""

    def on_logits(self, event: LogitsEvent) -> None:
        """The next-token distributions of an audited step are known."""

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Bracket nothing."""
        return NOTHING


class Observers:
    """Several observers as one.

    Attributes:
        each: The observers.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.each = tuple(observers)
        # a span costs microseconds in every layer of every step: only observers that want spans pay
        self._spanning = [observer for observer in observers if wants_spans(observer)]

    def on(self, event: Event) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on(event)

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Nest every observer's span."""
        if not self._spanning:
            return NOTHING
        if len(self._spanning) == 1:
            return self._spanning[0].span(name, layer, moved_bytes)
        return self._nested(name, layer, moved_bytes)

    @contextmanager
    def _nested(self, name: str, layer: int | None, moved_bytes: int) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._spanning:
                stack.enter_context(observer.span(name, layer, moved_bytes))
            yield


def as_one(observers: Sequence[Observer]) -> Observer:
    """Return an observer that stands for all of them."""
    if not observers:
        return NullObserver()
    return observers[0] if len(observers) == 1 else Observers(observers)


def wants(observer: Observer, event: type[Event]) -> bool:
    """Say whether an observer does anything with an event."""
    if isinstance(observer, Observers):
        return any(wants(one, event) for one in observer.each)
    return _listened(observer) and any(
        _overrides(observer, name) for name in ("on", HANDLERS[event])
    )


def wants_spans(observer: Observer) -> bool:
    """Say whether an observer does anything with spans."""
    if isinstance(observer, Observers):
        return any(wants_spans(one) for one in observer.each)
    return _listened(observer) and _overrides(observer, "span")


def _listened(observer: Observer) -> bool:
    return getattr(observer, "listened", True)  # an observer need not be a `NullObserver`


def _overrides(observer: Observer, method: str) -> bool:
    base = getattr(NullObserver, method)
    return getattr(type(observer), method, base) is not base
