"""The protocol of observers, all that the core knows of them."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol, get_args

from sfi_core.observers import events

NOTHING = nullcontext()
AHEAD = "ahead"  # the span of a forward pass that is launched before its step begins
HANDLERS: dict[type[events.Event], str] = {  # an observer's method for each event: `on_begin_step` for `BeginStepEvent`
    kind: "on_" + re.sub(r"\B([A-Z])", r"_\1", kind.__name__.removesuffix("Event")).lower()
    for kind in get_args(events.Event)
}
SPANS = "spans"  # among `Observer.wants`: the spans that happen to exist
EVERY_SPAN = "every span"  # those inside steps too, so that no step is replayed as a CUDA graph
Wanted = frozenset[type[events.Event] | str]
EVERYTHING: Wanted = frozenset({*HANDLERS, SPANS, EVERY_SPAN})


class Observer(Protocol):
    """Receives events and brackets spans; must not change what the core computes."""

    wants: Wanted  # the kinds of events that it uses, `SPANS` for spans and `EVERY_SPAN`; others may come all the same

    def on(self, event: events.Event) -> None:
        """Receive an event; an observer may see several runs in turn."""

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Bracket a region that has to move `moved_bytes`, for NVTX ranges and timings."""


class NullObserver:
    """Observes nothing: a base for observers, who want what they define: methods of `HANDLERS`, `on` or `span`."""

    wants: Wanted = frozenset()

    def __init_subclass__(cls) -> None:
        """Note what the class has."""
        super().__init_subclass__()
        if "wants" not in vars(cls):
            hears = cls.on is not NullObserver.on
            wanted = {event for event, handler in HANDLERS.items() if hears or hasattr(cls, handler)}
            cls.wants = frozenset({*wanted, *((SPANS, EVERY_SPAN) if cls.span is not NullObserver.span else ())})

    def on(self, event: events.Event) -> None:
        """Hand the event to its own method, if there is one."""
        handler = getattr(self, HANDLERS[type(event)], None)
        if handler is not None:
            handler(event)

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Bracket nothing."""
        return NOTHING


class Observers:
    """Several observers as one, which wants what any does, or all if one does not say; no spans without `spans`."""

    def __init__(self, observers: Sequence[Observer], *, spans: bool = True) -> None:
        self.each = tuple(observers)
        wanted = [getattr(observer, "wants", EVERYTHING) for observer in observers]
        self.wants: Wanted = frozenset().union(*wanted) - (set() if spans else {SPANS, EVERY_SPAN})
        # a span costs microseconds in every layer of every step: only observers that want spans pay
        self.spanning = [
            observer for observer, wants in zip(observers, wanted, strict=True) if spans and SPANS in wants
        ]

    def on(self, event: events.Event) -> None:
        """Forward the event to every observer."""
        for observer in self.each:
            observer.on(event)

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
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


class HeldSelections(Observers):
    """Passes events on, but holds the selections of decoding steps until `settle` or `keep`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__([observer])
        self._held: dict[int, list[events.SelectionEvent]] = defaultdict(list)

    def on(self, event: events.Event) -> None:
        """Pass an event on; hold a selection unless the prompt's end made it."""
        if isinstance(event, events.SelectionEvent) and event.step > 0:
            self._held[event.request].append(event)
        else:
            super().on(event)

    def settle(self, request: int, step: int) -> None:
        """Pass on a request's selections, as those of `step`."""
        for event in self._held.pop(request, ()):
            super().on(replace(event, step=step))

    def keep(self, request: int, stop: int) -> None:
        """Pass on a request's selections of steps before `stop`, none of them for 0; drop those of rejected tokens."""
        for event in self._held.pop(request, ()):
            if event.step < stop:
                super().on(event)
