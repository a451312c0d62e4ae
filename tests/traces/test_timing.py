"""How long spans took."""

import time
from types import SimpleNamespace

import pytest
import torch

from sfi_core.observers.events import BeginStepEvent
from sfi_traces.record.timing import TimingObserver


class Rows:
    def __init__(self, device: str) -> None:
        self._spans: list = []
        self.observer = TimingObserver(device, self._spans.extend)

    def __call__(self) -> list:
        self.observer.flush()
        return [span.row() for span in self._spans]


def begin(observer, step) -> None:
    observer.on_begin_step(BeginStepEvent(step=step, slow=(), fast=(0,)))


def test_a_span_s_row_says_where_it_was_and_how_long_it_took():
    before = time.perf_counter()
    rows = Rows("cpu")
    observer = rows.observer
    begin(observer, 4)
    with observer.span("forward"):
        with observer.span("attention.fast", 2, 640):
            time.sleep(0.01)
        with observer.span("pack", 2):
            pass
    wall = 1e6 * (time.perf_counter() - before)
    inner, pack, outer = rows()
    assert [row[:4] for row in (inner, pack, outer)] == [
        (4, 2, "attention.fast", "main"),
        (4, 2, "pack", "main"),
        (4, None, "forward", "main"),
    ]
    assert [row[6] for row in (inner, pack, outer)] == [640, None, None]
    assert 0 <= outer[4] <= inner[4]
    assert inner[4] + inner[5] <= pack[4]
    assert pack[4] + pack[5] <= outer[4] + outer[5] <= wall
    assert 10_000 <= inner[5] <= outer[5]


def test_a_sink_gets_each_step_s_spans_when_the_next_begins():
    steps = []
    observer = TimingObserver("cpu", lambda spans: steps.append([s.row()[:3] for s in spans]))
    begin(observer, 1)
    with observer.span("forward"):
        pass
    with observer.span("sample"):
        begin(observer, 2)
        assert steps == [[(1, None, "forward")]]
    observer.flush()
    observer.flush()
    assert steps == [[(1, None, "forward")], [(1, None, "sample")]]


class FakeEvent:
    """A CUDA event on a device whose clock a test sets; nothing may be asked before it is waited for."""

    now = 0.0
    waited = 0

    def __init__(self, **options) -> None:
        assert options == {"enable_timing": True, "blocking": True}
        self.there = False

    def record(self, stream) -> None:
        self.at, self.stream = FakeEvent.now, stream

    def synchronize(self) -> None:
        self.there = True
        FakeEvent.waited += 1

    def elapsed_time(self, other) -> float:
        assert self.there
        assert other.there
        return float(torch.tensor(other.at - self.at, dtype=torch.float32))


@pytest.fixture
def device(monkeypatch) -> SimpleNamespace:
    streams = SimpleNamespace(current=0)
    FakeEvent.now, FakeEvent.waited = 7000.0, 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name, number in (("default_stream", lambda: 0), ("current_stream", lambda: streams.current)):
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: SimpleNamespace(cuda_stream=number()))
    return streams


def test_a_device_s_spans_are_read_from_its_events_without_waiting_while_it_runs(device):
    rows = Rows("cuda:0")
    observer = rows.observer
    begin(observer, 0)
    FakeEvent.now += 2
    with observer.span("forward"):
        FakeEvent.now += 3
        with observer.span("pack", 1, 64):
            FakeEvent.now += 0.5
    assert FakeEvent.waited == 0
    assert rows() == [(0, 1, "pack", "main", 5000.0, 500.0, 64), (0, None, "forward", "main", 2000.0, 3500.0, None)]
