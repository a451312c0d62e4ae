"""Observers: several act as one, and none costs nothing."""

import pytest
import torch

from sfi_core.observers.events import SelectionEvent, StepEvent
from sfi_core.observers.observer import SPANS, NullObserver, Observers
from tests.fakes import RecordingObserver

STEP = StepEvent(
    request=0, step=3, batch_step=3, position=7, token_id=5, slow=False, reason="",
    steps_since_slow=2, attended_tokens=4.0, context_tokens=8, elapsed_us=1.0,
)  # fmt: skip
SELECTION = SelectionEvent(request=0, step=3, layer=1, index_HK=torch.zeros(2, 3, dtype=torch.int32), diagnostics={})


def test_every_observer_gets_every_event():
    first, second = RecordingObserver(), RecordingObserver()
    observers = Observers([first, second])
    observers.on(STEP)
    observers.on(SELECTION)
    for observer in (first, second):
        assert observer.steps == [STEP]
        assert observer.selections[0] is SELECTION


def test_every_observer_brackets_the_same_region():
    first, second = RecordingObserver(), RecordingObserver()
    with Observers([first, second]).span("attention.dense", 3):
        assert (first.open, second.open) == (1, 1)
    for observer in (first, second):
        assert (observer.open, observer.spans) == (0, [("attention.dense", 3)])


def test_spans_close_when_the_region_fails():
    first, second = RecordingObserver(), RecordingObserver()
    with pytest.raises(KeyError), Observers([first, second]).span("sample"):
        raise KeyError
    assert (first.open, second.open) == (0, 0)


def test_an_observer_of_one_thing_inherits_the_rest():
    class Counting(NullObserver):
        count = 0

        def on_step(self, event: StepEvent) -> None:
            self.count += 1

    observer = Counting()
    observer.on(STEP)
    observer.on(SELECTION)
    with observer.span("sample"):
        pass
    assert observer.count == 1


class Everything(NullObserver):
    def on(self, event) -> None:
        """Take it."""


@pytest.mark.parametrize(
    ("observer", "wanted"), [(NullObserver(), False), (RecordingObserver(), True), (Everything(), True)]
)
def test_what_an_observer_overrides_is_what_it_wants(observer: NullObserver, wanted: bool):
    assert (SelectionEvent in observer.wants) is wanted
    assert (SelectionEvent in Observers([NullObserver(), observer]).wants) is wanted
    spans = isinstance(observer, RecordingObserver)
    assert (SPANS in observer.wants) is (SPANS in Observers([observer]).wants) is spans
