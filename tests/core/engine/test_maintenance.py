"""The second stream: schedules that it allows give what the order of the code gives, and no edge is missing.

The kernels' references stand in for the kernels, so that a run of six layers takes no minutes.
"""

import gc
import weakref

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig
from sfi_core.engine.maintenance import Maintenance, main_stream
from sfi_core.state.side_stream import RING_PLACES, SecondStream, SideStream
from tests.core.conftest import tiny_qwen3
from tests.covering import first
from tests.cuda_clocks import Device
from tests.fakes import use_references
from tests.schedules import AnyTime, Lazy, Watching

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")
LAYERS = RING_PLACES + 2
PROMPTS = [list(range(5, 45)), list(range(3, 28)), list(range(50, 57))]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=6, t_max=3, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 3)), dense_layers=(1,),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3(layers=LAYERS)


@pytest.fixture
def complete(monkeypatch, model):
    """Run on the triton backend with a side of one's own; return all that the run said."""

    def run(side, **options) -> tuple:
        monkeypatch.setattr(
            "sfi_core.engine.maintenance.side_of", lambda *_, overlap: side if overlap else SideStream()
        )
        observer = Watching(side)
        options = {"config": CONFIG, "max_new_tokens": 12, "stop_token_ids": (), **options}
        result = sfi_core.generate(
            model, None, options.pop("prompts", PROMPTS), page_size=16, observers=[observer],
            **{"engine": EngineOptions(backend="triton"), **options},
        )  # fmt: skip
        chosen = {
            (e.step, e.layer, e.request): (e.index_HK.tolist(), {k: v.tolist() for k, v in e.diagnostics.items()})
            for e in observer.selections
        }
        steps = [(e.step, e.request, e.token_id, e.reason, e.attended_tokens) for e in observer.steps]
        return steps, chosen, result.report.paths

    return run


@pytest.fixture
def references(monkeypatch):
    use_references(monkeypatch)


@pytest.fixture
def in_order(references, complete):
    outcome = complete(SideStream())
    slow = [(step, request) for step, request, _, reason, _ in outcome[0] if reason and step]
    assert len(slow) > len({step for step, _ in slow}) > 1, "several requests share a slow step"
    return outcome


@pytest.mark.parametrize("side", first([Lazy, *(lambda seed=seed: AnyTime(seed) for seed in range(2))]))
def test_every_legal_schedule_gives_what_the_code_s_order_gives(complete, in_order, side):
    stream = side()
    assert complete(stream) == in_order
    assert stream.most > 1, "jobs were late"


def test_without_overlap_nothing_is_late(complete, in_order):
    side = Lazy()
    assert complete(side, engine=EngineOptions(backend="triton", overlap=False)) == in_order
    assert side.most == 0


@pytest.mark.parametrize("policy", first(["snapkv", "prior-only"]))
def test_other_policies_may_select_late(references, complete, policy):
    assert complete(Lazy(), policy=policy) == complete(SideStream(), policy=policy)


@pytest.mark.parametrize("policy", ["codescan", "random-k"])
def test_policies_that_look_further_stay_in_order(references, complete, policy):
    side = Lazy()
    complete(side, policy=policy, max_new_tokens=3)
    assert side.most == 0


@pytest.mark.parametrize("edge", first(["wait", "join"]))
def test_a_missing_edge_shows(complete, in_order, edge):
    side = Lazy()
    setattr(side, edge, lambda *_: None)
    with pytest.raises((AssertionError, ValueError)):  # wrong, or of shapes that do not fit
        assert complete(side) == in_order


def decode_two_steps(device: Device) -> None:
    """Two slow steps; the side reads a layer's evidence and writes its segment, which the next step reads."""
    maintenance = Maintenance(SecondStream(torch.cuda.Stream(torch.device("cuda:0"), priority=0)))
    buffers: dict[int, int] = {}
    for _ in range(2):
        for layer in range(LAYERS):
            device.touch(1000 + layer, write=False)  # the packed segment
            room = maintenance.room(8, torch.device("cpu"))
            slot = buffers.setdefault(id(room), len(buffers))
            device.touch(slot, write=True)

            def work(items: list[tuple[int, int]]) -> None:
                for slot, layer in items:
                    device.touch(slot, write=False)
                    device.touch(1000 + layer, write=True)

            maintenance.submit((slot, layer), work)
        maintenance.join()
    assert len(buffers) == RING_PLACES


def test_events_order_every_use_of_a_slot_and_of_a_segment(monkeypatch):
    device = Device()
    device.install(monkeypatch)
    decode_two_steps(device)
    assert device.races() == []


@pytest.mark.parametrize(("stream", "race"), [("side", ("main", "side")), ("main", ("side", "main"))])
def test_an_event_that_a_stream_does_not_wait_for_is_a_race(monkeypatch, stream, race):
    device = Device()
    device.dropped = (stream,)
    device.install(monkeypatch)
    decode_two_steps(device)
    assert race in device.races()


def test_what_a_job_reads_lives_until_the_main_stream_has_waited_for_it():
    """PyTorch's allocator would hand the memory to the main stream's next layer."""

    class Silent(Lazy):
        def one(self) -> None:
            self.pending.pop(0)

    maintenance = Maintenance(Silent())
    evidence = torch.zeros(3)
    alive = weakref.ref(evidence)
    maintenance.room(1, torch.device("cpu"))
    maintenance.submit(evidence, len)
    del evidence
    for _ in range(RING_PLACES - 1):
        maintenance.room(1, torch.device("cpu"))
        maintenance.submit(None, len)
    gc.collect()
    assert alive() is not None
    maintenance.room(1, torch.device("cpu"))
    gc.collect()
    assert alive() is None


def test_a_slot_grows_to_what_a_layer_asks_for():
    maintenance = Maintenance(SideStream())
    small = maintenance.room(4, torch.device("cpu"))
    assert maintenance.room(3, torch.device("cpu")) is small
    assert maintenance.room(5, torch.device("cpu")).numel() == 5


def test_the_main_stream_is_only_another_one_where_there_is_a_side():
    for device, overlap in (("cpu", True), ("cuda", False)):
        with main_stream(torch.device(device), overlap=overlap):
            pass  # a CUDA stream could not be made here
