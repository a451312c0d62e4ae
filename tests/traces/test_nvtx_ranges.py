"""Ranges that reach a profiler."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sfi_core.observers.events import BeginStepEvent, StepEvent
from sfi_core.observers.observer import NOTHING, SPANS, Observers
from sfi_traces.record import nvtx
from sfi_traces.record.nvtx import NvtxObserver
from tests.traces.told import run_event, step_event

HERE = Path(__file__).parent
CHILD = """
from contextlib import closing
from sfi_core.observers.events import BeginStepEvent
from sfi_core.observers.observer import SPANS
from sfi_traces.record.nvtx import NvtxObserver
from tests.traces.told import run_event, step_event

with closing(NvtxObserver()) as observer:
    assert SPANS in observer.wants
    observer.on_run(run_event(3))
    for step, slow, fast in ((0, (0, 1, 2), ()), (1, (), (0, 2)), (2, (2,), (0,)), (3, (0,), ())):
        observer.on_begin_step(BeginStepEvent(step=step, slow=slow, fast=fast))
        with observer.span("forward"), observer.span("attention.mixed", 1, 100):
            pass
        for request in (*slow, *fast):
            observer.on_step(step_event(request, step))
"""
HEARD = """\
start|sfi|run sfi|ff8d99ae
start|sfi|prefill step|ff3a7ca5
push|sfi|forward|ff8d99ae
push|sfi|attention.mixed|ff8d99ae
pop|sfi
pop|sfi
end|sfi|2
start|sfi|fast step|ff2e9e5b
push|sfi|forward|ff8d99ae
push|sfi|attention.mixed|ff8d99ae
pop|sfi
pop|sfi
end|sfi|3
start|sfi|mixed step|ffedae49
push|sfi|forward|ff8d99ae
push|sfi|attention.mixed|ff8d99ae
pop|sfi
pop|sfi
end|sfi|4
start|sfi|slow step|ffd1495b
push|sfi|forward|ff8d99ae
push|sfi|attention.mixed|ff8d99ae
pop|sfi
pop|sfi
end|sfi|5
end|sfi|1
"""


class Listener:
    """Stands for the domain that a profiler listens to."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def get_event_attributes(self, message, color):
        return type("Attributes", (), {"message": message})()

    def start_range(self, attributes):
        self.open.append(attributes.message)
        return attributes.message

    def end_range(self, message):
        self.open.remove(message)

    def push_range(self, attributes):
        self.open.append(attributes.message)

    def pop_range(self):
        self.open.pop()


@pytest.fixture
def listener(monkeypatch) -> Listener:
    domain = Listener()
    monkeypatch.setattr(nvtx, "_domain", lambda: domain)
    return domain


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build what listens")
def test_a_listener_hears_every_run_step_and_span(tmp_path):
    library, heard = tmp_path / "listener.so", tmp_path / "heard"
    build = ["gcc", "-shared", "-fPIC", "-o", library, HERE / "nvtx_listener.c"]
    subprocess.run(build, check=True)
    paths = [HERE.parents[1], *(HERE.parents[1] / name for name in ("traces", "kernels"))]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "NVTX_INJECTION64_PATH": str(library),
        "SFI_NVTX_LOG": str(heard),
    }
    subprocess.run([sys.executable, "-c", CHILD], env=os.environ | environment, check=True)
    assert [line.strip() for line in heard.read_text().splitlines()] == HEARD.splitlines()


def test_nothing_is_done_where_nobody_listens():
    observer = NvtxObserver()
    observer.on_run(run_event())
    observer.on_begin_step(BeginStepEvent(step=1, slow=(), fast=(0, 1)))
    assert observer.span("forward") is NOTHING
    observer.on_step(step_event(0, 1))
    observer.on_step(step_event(1, 1))
    observer.close()
    assert not NvtxObserver().wants


def test_spans_are_wanted_only_where_somebody_listens(monkeypatch):
    alone = NvtxObserver()
    monkeypatch.setattr(nvtx, "_domain", Listener)
    heard = NvtxObserver()
    for observer, listened in ((alone, False), (heard, True)):
        for recipient in (observer, Observers([observer, observer])):
            assert (SPANS in recipient.wants) is listened
            assert (StepEvent in recipient.wants) is listened


def test_a_machine_without_nvtx_decodes_as_well(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert not NvtxObserver().wants
    assert NvtxObserver().span("forward") is NOTHING


def test_a_step_ends_with_its_last_request(listener):
    observer = NvtxObserver()
    observer.on_begin_step(BeginStepEvent(step=1, slow=(1,), fast=(0, 2)))
    observer.on_step(step_event(0, 1))
    observer.on_step(step_event(1, 1))
    assert listener.open == ["mixed step"]
    observer.on_step(step_event(2, 1))
    assert listener.open == []


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_what_a_failure_leaves_open_is_closed(listener, failure):
    def run() -> None:
        with closing(NvtxObserver()) as observer:
            observer.on_run(run_event())
            observer.on_begin_step(BeginStepEvent(step=1, slow=(), fast=(0, 1)))
            with observer.span("forward"), observer.span("pack", 3):
                assert listener.open == ["run sfi", "fast step", "forward", "pack"]
                raise failure

    with pytest.raises(failure):
        run()
    assert listener.open == []
