"""What the core tells the outside world. The core knows no observer but this protocol."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from sfi_core.observers.events import (
    AuditEvent,
    BeginStepEvent,
    LogitsEvent,
    PromptEvent,
    RunEvent,
    SelectionEvent,
    StepEvent,
)


class Observer(Protocol):
    """Receives events and brackets spans; must not change what the core computes."""

    def on_run(self, event: RunEvent) -> None:
        """Note that a run begins; an observer may see several, one after the other."""

    def on_prompt(self, event: PromptEvent) -> None:
        """Record a piece of the prompts."""

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Note that a step begins."""

    def on_step(self, event: StepEvent) -> None:
        """Record one finished step of one request."""

    def on_selection(self, event: SelectionEvent) -> None:
        """Record one refresh of the selected memory."""

    def on_audit(self, event: AuditEvent) -> None:
        """Record one layer of an audited step."""

    def on_logits(self, event: LogitsEvent) -> None:
        """Record the next-token distributions of an audited step."""

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Bracket a region, for NVTX ranges and timings; `moved_bytes` is what it has to move."""


class NullObserver:
    """Observes nothing, at no cost; a base for observers that want some events only."""

    def on_run(self, event: RunEvent) -> None:
        """Drop the event."""

    def on_prompt(self, event: PromptEvent) -> None:
        """Drop the event."""

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Drop the event."""

    def on_step(self, event: StepEvent) -> None:
        """Drop the event."""

    def on_selection(self, event: SelectionEvent) -> None:
        """Drop the event."""

    def on_audit(self, event: AuditEvent) -> None:
        """Drop the event."""

    def on_logits(self, event: LogitsEvent) -> None:
        """Drop the event."""

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Bracket nothing."""
        return NOTHING


NOTHING = nullcontext()


class Observers:
    """Several observers as one.

    Attributes:
        each: They.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.each = tuple(observers)
        # a span costs microseconds in every layer of every step: not for who does not look at it
        self._spanning = [o for o in observers if hears(o, "span")]

    def on_run(self, event: RunEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_run(event)

    def on_prompt(self, event: PromptEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_prompt(event)

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_begin_step(event)

    def on_step(self, event: StepEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_step(event)

    def on_selection(self, event: SelectionEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_selection(event)

    def on_audit(self, event: AuditEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_audit(event)

    def on_logits(self, event: LogitsEvent) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on_logits(event)

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


def together(observers: Sequence[Observer]) -> Observer:
    """Return an observer that stands for all of them."""
    if not observers:
        return NullObserver()
    return observers[0] if len(observers) == 1 else Observers(observers)


def hears(observer: Observer, what: str) -> bool:
    """Say whether an observer does anything with spans or with an event, by the method's name."""
    if isinstance(observer, Observers):
        return any(hears(one, what) for one in observer.each)
    return getattr(type(observer), what) is not getattr(NullObserver, what)
