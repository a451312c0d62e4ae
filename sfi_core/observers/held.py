"""Selections that an observer is told of once it is known whether anything reads them."""

from collections import defaultdict
from dataclasses import replace

from sfi_core.observers.events import Event, SelectionEvent
from sfi_core.observers.observer import Observer, Observers


class HeldSelections(Observers):
    """Passes everything on, but holds what decoding steps select until `settle`, `keep` or `drop`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__([observer])
        self._held: dict[int, list[SelectionEvent]] = defaultdict(list)

    def on(self, event: Event) -> None:
        """Pass an event on, or hold it; what a prompt's end selects is passed on."""
        if isinstance(event, SelectionEvent) and event.step > 0:
            self._held[event.request].append(event)
        else:
            super().on(event)

    def settle(self, request: int, step: int) -> None:
        """Tell what a request has selected, at the step that it turned out to be."""
        for event in self._held.pop(request, ()):
            super().on(replace(event, step=step))

    def keep(self, request: int, stop: int) -> None:
        """Tell what a request's steps before `stop` have selected; the others fell with rejected tokens."""
        for event in self._held.pop(request, ()):
            if event.step < stop:
                super().on(event)

    def drop(self, request: int) -> None:
        """Forget what a request has selected: it fell with a rejected token."""
        self._held.pop(request, None)
