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
AHEAD = (
    "ahead"  # the span of the next step's forward pass, where it is launched before its step begins
)
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
        takes_spans: Of an observer that overrides `span`: True to have all spans, for which steps run one
            kernel after the other where they could be replayed; None for the spans that there are; False for
            none.
    """

    listened = True
    takes_spans: bool | None = True

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
        spanning: Those of them that get spans.
    """

    def __init__(self, observers: Sequence[Observer], *, spans: bool = True) -> None:
        """Take the observers; without `spans` they hear events only."""
        self.each = tuple(observers)
        # a span costs microseconds in every layer of every step: only observers that want spans pay
        self.spanning = [one for one in observers if spans and wants_spans(one)]

    def on(self, event: Event) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on(event)

    def span(
        self, name: str, layer: int | None = None, moved_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Nest every observer's span."""
        if not self.spanning:
            return NOTHING
        if len(self.spanning) == 1:
            return self.spanning[0].span(name, layer, moved_bytes)
        return self._nested(name, layer, moved_bytes)

    @contextmanager
    def _nested(self, name: str, layer: int | None, moved_bytes: int) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.spanning:
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
        return bool(observer.spanning)
    return _listened(observer) and _overrides(observer, "span") and _takes(observer) is not False


def needs_spans(observer: Observer) -> bool:
    """Say whether an observer must have the spans inside steps, which a replayed step has none of."""
    if isinstance(observer, Observers):
        return any(needs_spans(one) for one in observer.spanning)
    return wants_spans(observer) and _takes(observer) is True


def _listened(observer: Observer) -> bool:
    return getattr(observer, "listened", True)  # an observer need not be a `NullObserver`


def _takes(observer: Observer) -> bool | None:
    return getattr(observer, "takes_spans", True)


def _overrides(observer: Observer, method: str) -> bool:
    base = getattr(NullObserver, method)
    return getattr(type(observer), method, base) is not base
