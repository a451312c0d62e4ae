"""What replayed steps share: descriptors written over one another, and steps described ahead."""

import pytest
import torch

from sfi_core import SfiConfig
from sfi_core.engine.batch_pass import Requests
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.graphs.steps import note_step
from sfi_core.engine.run import Run
from sfi_core.policies import Selection
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.state.kv_cache import KVCache
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, StepRequest
from tests.fakes import RecordingObserver

CONFIG = SfiConfig(trigger_token_ids=(1,), sink=2, recent=10)
POLICY = SFI(CONFIG, Trigger(frozenset({1}), CONFIG))


def requests(*modes: int, length: int = 30) -> Requests:
    own = [
        StepRequest(mode=mode, length=length, recent_start=20, packed=4, sink=2, count=int(mode != IDLE))
        for mode in modes
    ]
    return Requests(own, None)


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers.of(KVCache(3, 64, 16, "triton"), POLICY, torch.device("cpu"), 6)


def test_every_step_is_written_to_one_buffer_with_padded_lists(buffers):
    where = buffers.descriptor.buffer.data_ptr()
    step, dense = buffers.describe(requests(SLOW, SLOW, SLOW))
    assert (step.slow_rows, step.longest, dense) == (3, 64, None)
    buffers.describe(requests(SLOW, FAST, IDLE))
    assert buffers.descriptor.buffer.data_ptr() == where
    assert buffers.descriptor.slow_R[0].tolist() == [0]
    for slow in range(4):
        buffers.describe(requests(*[SLOW] * slow, *[FAST] * (3 - slow)))
        assert buffers.kind == (1, slow, False)


@pytest.mark.parametrize(("drafted", "queries"), [(0, 1), (1, 2), (3, 5), (4, 5), (5, 6)])
def test_a_verification_is_as_long_as_the_next_power_of_two(buffers, drafted, queries):
    own = StepRequest(mode=SLOW, length=30, recent_start=20, packed=4, sink=2, count=1 + drafted)
    step, _ = buffers.describe(Requests([own, *requests(FAST, IDLE).requests], None))
    assert (step.queries, buffers.kind) == (queries, (queries, 1, False))
    assert step.append_count_B.tolist() == [1 + drafted, 1, 0]


def test_a_request_that_stopped_leaves_a_step_described_ahead_as_it_is(buffers):
    buffers.write(requests(SLOW, SLOW, FAST), ahead=True)
    before = buffers.descriptor.buffer.clone()
    step, _ = buffers.describe(requests(IDLE, SLOW, FAST))
    assert buffers.launched
    assert (step.slow, step.fast) == ((1,), (2,))
    assert buffers.places == {0: 0, 1: 1}, "as it was launched"
    assert torch.equal(buffers.descriptor.buffer, before)


@pytest.mark.parametrize("change", [{"length": 31}, {}], ids=["another length", "another mode"])
def test_a_step_that_turns_out_otherwise_is_described_anew(buffers, change):
    buffers.write(requests(FAST, SLOW, FAST), ahead=True)
    real = (FAST, SLOW, FAST) if change else (SLOW, SLOW, FAST)
    buffers.describe(requests(*real, **change))
    assert not buffers.launched
    assert buffers.descriptor.length_B.tolist() == [change.get("length", 30)] * 3
    buffers.describe(requests(*real, **change))
    assert not buffers.launched, "described, not ahead"


def test_a_selection_is_the_request_s_own_though_one_before_it_stopped(buffers, monkeypatch):
    observer = RecordingObserver()
    run = Run(POLICY, observer, buffers.store)
    for state in run.requests:
        state.prompt_tokens, state.length, state.recent_start, state.packed_tokens = 29, 29, 20, 4
    buffers.write(requests(SLOW, SLOW, FAST), ahead=True)
    run.descriptors = buffers
    run.requests[0].finished = True
    monkeypatch.setattr(type(POLICY), "plan", lambda *_: ["trigger", "trigger", ""])
    run.begin_decode()
    assert buffers.launched
    index = torch.tensor([[[5, 6]], [[7, 8]]], dtype=torch.int32)
    note_step(run, {(0,): Selection(index)}, buffers.places)
    assert [(e.request, e.index_HK.tolist()) for e in observer.selections] == [(1, [[7, 8]])]
