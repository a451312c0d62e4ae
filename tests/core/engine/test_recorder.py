"""Recording CUDA graphs, without CUDA: what is refused by name, and what the collector does meanwhile."""

import gc
import threading
import warnings
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sfi_core
from sfi_core import EngineOptions
from sfi_core.engine.graphs.recorder import CudaRecorder, no_collection, refuse_waiting
from sfi_core.engine.maintenance import main_stream
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.measure.bench.bench import Bench
from sfi_core.measure.bench.ours import run_ours
from sfi_core.measure.bench.rows import point_rows
from sfi_core.measure.bench.runs import BenchRow, Prompts, variants
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.measure.kernel_bench.timing import CudaClock
from sfi_core.observers.events import SelectionEvent
from sfi_core.sizes.step import ByteModel
from sfi_core.state.side_stream import stream_of
from sfi_kernels.pack import pack
from tests.core.conftest import tiny_qwen3
from tests.cuda_clocks import Device
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import Listener, RecordingObserver
from tests.replays import CONFIG

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for CUDA")
CUDA = torch.device("cuda:0")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default)  # noqa: SLF001


class Watchful(TorchDispatchMode):
    """Refuses what waits, in the words of PyTorch's synchronization check."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def modes(monkeypatch) -> list:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


class Looks(torch.nn.Module):
    def __init__(self, look) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor):
        return self.look(x + 1)


@pytest.mark.parametrize(
    ("look", "name"),
    [(lambda x: x.sum().item(), "aten::_local_scalar_dense"), (lambda x: x.nonzero(), "aten::nonzero")],
)
def test_the_operation_that_waits_and_its_module_are_named(modes, look, name):
    model = torch.nn.Sequential(torch.nn.Identity(), Looks(look))
    said = rf"got {name} in Looks \(test_recorder\.py:\d+\); use --set engine\.graphs=false$"
    with pytest.raises(BackendError, match=said), Watchful(), refuse_waiting():
        model(torch.ones(2))
    assert modes == [0, "warn", 0]


def test_another_error_stays_as_it_is(modes):
    with pytest.raises(RuntimeError, match=r"^shapes$"), refuse_waiting():
        raise RuntimeError("shapes")
    assert modes == [0, "warn", 0]


@pytest.fixture
def captures(monkeypatch, modes) -> list[bool]:
    """Stand for captures; list whether the collector was on within each."""
    Device().install(monkeypatch)
    collecting: list[bool] = []

    @contextmanager
    def capture(*_, **__):
        yield
        collecting.append(gc.isenabled())

    class Graph:
        def replay(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return collecting


class Knot:
    """In a circle of references, so that only the collector frees it."""

    freed = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        Knot.freed += 1


def test_garbage_is_collected_before_a_capture_and_not_within(captures):
    gc.collect()
    Knot.freed = 0
    freed: list[int] = []

    def work() -> None:
        Knot()
        freed.append(Knot.freed)

    CudaRecorder(CUDA)(work)
    assert freed == [0, 0, 2], "two passes, then the capture"
    assert captures == [False]
    assert gc.isenabled()


def test_streams_are_made_once_and_shared_by_all_runs(captures):
    """PyTorch's allocator keeps a stream's freed memory for that stream."""
    runs = [CudaRecorder(CUDA) for _ in range(2)]
    for run in runs:
        run(lambda: None)
    with main_stream(CUDA, overlap=True):
        first = torch.cuda.current_stream(CUDA)
    with main_stream(CUDA, overlap=True):
        assert torch.cuda.current_stream(CUDA) is first
    roles = [stream_of(CUDA, role) for role in ("main", "record", "maintenance", "tiers")]
    assert roles[0] is first
    assert len({id(stream) for stream in roles}) == 4
    assert stream_of(torch.device("cuda:1"), "main") is not first
    other = []
    thread = threading.Thread(target=lambda: other.append(stream_of(CUDA, "main")))
    thread.start()
    thread.join()
    assert other[0] is not first, "a capture of one thread must not hold another one's work"


def test_the_kernel_bench_captures_without_the_collector(monkeypatch, captures):
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    CudaClock(CUDA, graphs=True).prepare(lambda: None)
    assert captures == [False]


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_before_after_an_error(on):
    before = gc.isenabled()

    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KeyError), no_collection():
            fail()
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()


def test_a_capture_that_cuda_refuses_is_no_step_to_replay(captures):
    passes: list[int] = []

    def work() -> None:
        passes.append(len(passes))
        if len(passes) == 3:
            raise RuntimeError("CUDA error: operation not permitted\nhow to go on")

    said = r"^a decoding step must fit a CUDA graph, got 'CUDA error: operation not permitted' outside"
    with pytest.raises(BackendError, match=said):
        CudaRecorder(CUDA)(work)
    assert gc.isenabled()


PROMPTS = [list(range(5, 45)), list(range(3, 28)), list(range(9, 50))]


class Deaf(RecordingObserver):
    wants = frozenset()


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    use_tensors(monkeypatch)
    return recorder


@pytest.fixture
def complete(model, recorder):
    def run(graphs: bool | None, *observers, **options):
        options = {"max_new_tokens": 8, "prompts": PROMPTS, "config": CONFIG, **options}
        prompts, config = options.pop("prompts"), options.pop("config")
        return sfi_core.generate(
            model, None, prompts, config, page_size=16, stop_token_ids=(),
            observers=observers, engine=EngineOptions(backend="triton", graphs=graphs), **options,
        ).report  # fmt: skip

    return run


def test_twice_as_many_steps_leave_as_many_counts(complete, monkeypatch):
    monkeypatch.delitem(pack.__dict__, "triton")  # no tensors stand for this kernel
    runs: list[Run] = []
    begin = Run.begin_decode
    monkeypatch.setattr(Run, "begin_decode", lambda run: runs.append(run) or begin(run))
    config = CONFIG.replace(t_max=1, trigger_token_ids=())
    sizes = []
    for steps in (5, 9):
        report = complete(True, config=config, prompts=PROMPTS[:2], max_new_tokens=steps)
        meter, (kernel,) = runs[-1].meter, report.kernels
        layers, later = 2, len(report.requests[0].slow_at) - 1
        assert (kernel.name, kernel.launches) == ("pack", layers * (2 + later)), "each prompt packs, then both together"
        sizes.append([len(meter.kernels), len(meter.paths)])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("graphs", [True, False])
def test_selections_that_nobody_hears_make_no_events(complete, monkeypatch, graphs):

    def told(*observers) -> list:
        requests = complete(graphs, *observers).requests
        return [(r.token_ids, r.mean_attended_tokens) for r in requests]

    def refuse(self: SelectionEvent, **_) -> None:
        raise LookupError("an event for nobody")

    expected = told(Listener())
    monkeypatch.setattr(SelectionEvent, "__init__", refuse)
    assert told(Deaf()) == expected
    with pytest.raises(LookupError, match="an event for nobody"):
        told(Listener())


def test_spans_that_nobody_hears_keep_no_step_from_being_replayed(complete):
    assert complete(True, Deaf(), max_new_tokens=4).paths["graph.replay"] > 0


def bench_row(model, asked: DecodeSettings) -> BenchRow:
    (point,), (variant,), (batch,) = asked.points(), variants(asked), asked.batches
    prompts = Prompts.of(asked, point, 96, torch.device("cpu"))
    bytes_ = ByteModel(weight_bytes=1000, batch=batch, row_bytes=8, heads=2, layers=1)
    return BenchRow(model, variant, point, asked, prompts, bytes_)


def test_a_benchmark_records_every_graph_before_it_measures(model, recorder):
    asked = DecodeSettings(
        policies=("sfi",), contexts=(40,), batches=(3,), baselines=(), steps=9, warm_up=4,
        slow_rate=Fraction(1, 3), engine=EngineOptions(backend="triton"),
        config=CONFIG.replace(trigger_delay=1),
    )  # fmt: skip
    ran, tapes = bench_row(model, asked), []
    ran.on_step = lambda _: tapes.append(recorder.tapes)
    sample = run_ours(ran)
    ran.samples = [sample, sample]
    assert tapes[asked.warm_up] == tapes[-1] == 3, "all fast, one slow, all slow"
    assert sample.report.paths["graph.replay"] == asked.total_steps
    assert "graph.eager" not in sample.report.paths
    (row,) = point_rows([ran], 1.0)
    assert row["paths"]["graph.replay"] == 2 * asked.total_steps
    assert row["not_replayed"] is None
    bench = Bench(model, asked)
    bench.rows = [row]
    assert bench.document()["notes"] == []


def test_a_benchmark_says_why_steps_were_not_replayed(model, recorder):
    asked = DecodeSettings(
        policies=("random-k",), contexts=(40,), batches=(1,), baselines=(), steps=3, warm_up=1,
        engine=EngineOptions(backend="triton"), config=CONFIG.replace(trigger_delay=1),
    )  # fmt: skip
    ran = bench_row(model, asked)
    ran.samples = [run_ours(ran)]
    (row,) = point_rows([ran], 1.0)
    reason = "CUDA graphs must be off with policy random-k, which selects with more than the evidence"
    assert row["paths"]["graph.eager"] == asked.total_steps
    assert row["not_replayed"].startswith(reason)
    bench = Bench(model, asked)
    bench.rows = [row, row]
    (note,) = bench.document()["notes"]
    assert note.startswith(f"random-k: steps ran one kernel after the other: {reason}")
