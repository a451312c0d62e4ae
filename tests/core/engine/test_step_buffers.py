"""What replayed steps share: descriptors written over one another, and steps described ahead."""

from functools import partial

import pytest
import torch

from sfi_core import SfiConfig
from sfi_core.engine.graphs.buffers import FixedStep
from sfi_core.engine.graphs.layer import note_step
from sfi_core.engine.run import Run
from sfi_core.policies import SFI, Selection
from sfi_core.state.kv_cache import KVCache
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, StepRequest
from tests.fakes import RecordingObserver

CONFIG = SfiConfig(trigger_token_ids=(1,), sink=2)
POLICY = SFI(CONFIG, Trigger(frozenset({1}), CONFIG))


def requests(*modes: int, length: int = 30, dense: bool = False) -> list[StepRequest]:
    return [
        StepRequest(
            mode=SLOW if dense and mode == FAST else mode,
            length=length,
            recent_start=20,
            packed=4,
            sink=2,
            count=int(mode != IDLE),
        )
        for mode in modes
    ]


@pytest.fixture
def fixed() -> FixedStep:
    return FixedStep.of(KVCache(3, 64, 16, "triton"), POLICY, torch.device("cpu"))


def test_every_step_is_written_to_one_buffer_with_padded_lists(fixed):
    where = fixed.descriptor.buffer.data_ptr()
    step, dense = fixed.enter(partial(requests, SLOW, SLOW, SLOW))
    assert (step.slow_rows, step.longest, dense) == (3, 64, None)
    fixed.enter(partial(requests, SLOW, FAST, IDLE))
    assert fixed.descriptor.buffer.data_ptr() == where
    assert fixed.descriptor.slow_R[0].tolist() == [0]
    assert [fixed.key(requests(*[SLOW] * n, *[FAST] * (3 - n))) for n in range(4)] == [0, 1, 2, 3]


def test_a_request_that_stopped_leaves_a_step_described_ahead_as_it_is(fixed):
    fixed.write(partial(requests, SLOW, SLOW, FAST), ahead=True)
    before = fixed.descriptor.buffer.clone()
    step, _ = fixed.enter(partial(requests, IDLE, SLOW, FAST))
    assert fixed.launched
    assert (step.slow, step.fast) == ((1,), (2,))
    assert fixed.places == {0: 0, 1: 1}, "as it was launched"
    assert torch.equal(fixed.descriptor.buffer, before)


@pytest.mark.parametrize("change", [{"length": 31}, {}], ids=["another length", "another mode"])
def test_a_step_that_turns_out_otherwise_is_described_anew(fixed, change):
    fixed.write(partial(requests, FAST, SLOW, FAST), ahead=True)
    real = (FAST, SLOW, FAST) if change else (SLOW, SLOW, FAST)
    fixed.enter(partial(requests, *real, **change))
    assert not fixed.launched
    assert fixed.descriptor.length_B.tolist() == [change.get("length", 30)] * 3
    fixed.enter(partial(requests, *real, **change))
    assert not fixed.launched, "described, not ahead"


def test_a_selection_is_the_request_s_own_though_one_before_it_stopped(fixed):
    observer = RecordingObserver()
    run = Run(POLICY, observer, fixed.cache)
    run.layers = {0}
    for state in run.requests:
        state.prompt_tokens, state.length, state.recent_start = 30, 30, 20
    fixed.write(partial(requests, SLOW, SLOW, FAST), ahead=True)
    run.descriptor, run.dense_descriptor = fixed.enter(partial(requests, IDLE, SLOW, FAST))
    index = torch.tensor([[[5, 6]], [[7, 8]]], dtype=torch.int32)
    note_step(run, {0: Selection(index)}, fixed.places)
    assert [(e.request, e.index_HK.tolist()) for e in observer.selections] == [(1, [[7, 8]])]
