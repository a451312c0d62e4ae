"""Selections that wait until it is known whether a step reads them."""

from collections import defaultdict
from dataclasses import replace

from sfi_core.observers.events import Event, SelectionEvent
from sfi_core.observers.observer import Observer, Observers


class HeldSelections(Observers):
    """Passes events on, but holds the selections of decoding steps until `settle`, `keep` or `drop`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__([observer])
        self._held: dict[int, list[SelectionEvent]] = defaultdict(list)

    def on(self, event: Event) -> None:
        """Pass an event on; hold a selection unless the prompt's end made it."""
        if isinstance(event, SelectionEvent) and event.step > 0:
            self._held[event.request].append(event)
        else:
            super().on(event)

    def settle(self, request: int, step: int) -> None:
        """Pass on a request's selections, as those of `step`."""
        for event in self._held.pop(request, ()):
            super().on(replace(event, step=step))

    def keep(self, request: int, stop: int) -> None:
        """Pass on a request's selections of steps before `stop`; drop those of rejected tokens."""
        for event in self._held.pop(request, ()):
            if event.step < stop:
                super().on(event)

    def drop(self, request: int) -> None:
        """Drop a request's selections, whose token was rejected."""
        self._held.pop(request, None)
