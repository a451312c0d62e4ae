"""Layers that select together choose what each would alone; what replayed steps share."""

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig
from sfi_core.engine import maintenance, select
from sfi_core.engine.batch_pass import Requests
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.graphs.steps import note_step
from sfi_core.engine.maintenance import Maintenance
from sfi_core.engine.run import Run
from sfi_core.policies import Selection
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.state.kv_cache import KVCache
from sfi_core.state.side_stream import SideStream
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, StepRequest
from tests.core.conftest import tiny_qwen3
from tests.core.engine.test_maintenance import CONFIG as OTHER
from tests.core.engine.test_maintenance import LAYERS, PROMPTS
from tests.fakes import Listener, RecordingObserver, use_references

CONFIG = OTHER.replace(span=2)


def chosen(seen: RecordingObserver):
    """Return the positions and diagnostics of each selection, by step, layer and request."""
    choices = {(e.step, e.layer, e.request): (e.index_HK.tolist(), e.diagnostics) for e in seen.selections}
    assert len(choices) == len(seen.selections)
    return choices


def steps(seen: RecordingObserver):
    return [(e.step, e.request, e.token_id, e.attended_tokens) for e in seen.steps]


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3(layers=LAYERS)


@pytest.fixture
def complete(model, monkeypatch):
    """Decode; return what an observer was told, the paths, and the layers of each joined selection."""

    def run(enough: int = maintenance.ENOUGH, observer: RecordingObserver | None = None, **options):
        together: list[int] = []
        every = select.refresh_handed
        monkeypatch.setattr(maintenance, "ENOUGH", enough)
        monkeypatch.setattr(select, "refresh_handed", lambda *about: (together.append(len(about[-1])), every(*about)))
        seen = observer or Listener()
        options = {"config": CONFIG, "max_new_tokens": 12, "stop_token_ids": (), **options}
        result = sfi_core.generate(model, None, PROMPTS, observers=[seen], **options)
        monkeypatch.setattr(select, "refresh_handed", every)
        return seen, result.report.paths, together

    return run


@pytest.mark.parametrize(("policy", "change"), [("sfi", {}), ("prior-only", {}), ("sfi", {"page_size": 5})])
def test_layers_together_choose_what_each_chooses_alone(complete, policy, change):
    options = {"policy": policy, "config": CONFIG.replace(**change)}
    alone, paths, ones = complete(enough=1, **options)
    heard, own_paths, together = complete(**options)
    assert set(ones) == {1}
    assert set(together) == {LAYERS - len(CONFIG.dense_layers)}
    assert sum(together) == len(ones)
    assert own_paths == paths
    assert steps(heard) == steps(alone)
    ours, theirs = chosen(heard), chosen(alone)
    assert ours.keys() == theirs.keys()
    for at, (index, diagnostics) in ours.items():
        assert index == theirs[at][0]
        torch.testing.assert_close(diagnostics, theirs[at][1])


def test_what_waits_is_worked_off_when_it_is_enough(complete):
    length = len(PROMPTS[0]) + 12
    numbers = 4 * length * 2  # two layers' logits of four query heads, or those of more in shorter prompts
    alone, *_, together = complete(enough=numbers)
    assert {2, 1} <= set(together)
    assert steps(alone) == steps(complete(enough=1)[0])


@pytest.mark.parametrize(
    ("policy", "observer"),
    [
        ("sfi", RecordingObserver),  # each layer's phases are timed
        ("random-k", Listener),
    ],
)
def test_others_select_layer_by_layer(complete, policy, observer):
    assert set(complete(policy=policy, observer=observer())[2]) == {1}


def test_a_step_that_breaks_off_selects_no_more():
    held, done = Maintenance(SideStream(), together=True), []
    held.submit("first", done.append, alike="row", numbers=1)
    held.drop()
    held.submit("second", done.append, alike="row", numbers=1)
    assert done == []
    held.join()
    assert done == [["second"]]


@pytest.mark.exhaustive
def test_both_schedules_of_the_triton_backend_choose_alike(model, monkeypatch):
    """Each layer by itself, as beside the next layers, or all together at the step's end."""
    use_references(monkeypatch)

    def told(*, overlap: bool, enough: int) -> tuple:
        monkeypatch.setattr(maintenance, "TOGETHER", enough)
        seen, engine = Listener(), EngineOptions(backend="triton", overlap=overlap)
        sfi_core.generate(
            model, None, PROMPTS, CONFIG, max_new_tokens=12, stop_token_ids=(), observers=[seen], engine=engine,
            page_size=16,
        )  # fmt: skip
        return steps(seen), {at: index for at, (index, _) in chosen(seen).items()}

    alone = told(overlap=True, enough=1 << 25)
    for enough in (1, 2000, 1 << 25):
        assert told(overlap=False, enough=enough) == alone


PLAIN = SfiConfig(trigger_token_ids=(1,), sink=2, recent=10)
POLICY = SFI(PLAIN, Trigger(frozenset({1}), PLAIN))


def requests(*modes: int, length: int = 30) -> Requests:
    rows = [
        StepRequest(mode=mode, length=length, recent_start=20, packed=4, sink=2, count=int(mode != IDLE))
        for mode in modes
    ]
    return Requests(rows, None)


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(KVCache(3, 64, 16, "triton"), torch.device("cpu"), policy=POLICY, most=6)


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
    verification = StepRequest(mode=SLOW, length=30, recent_start=20, packed=4, sink=2, count=1 + drafted)
    step, _ = buffers.describe(Requests([verification, *requests(FAST, IDLE).requests], None))
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
    note_step(run, {(0,): [Selection(index)]}, buffers.places, [])
    assert [(e.request, e.index_HK.tolist()) for e in observer.selections] == [(1, [[7, 8]])]
