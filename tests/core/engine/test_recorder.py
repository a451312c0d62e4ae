"""Recording CUDA graphs, without CUDA: what is refused by name, and what the collector does meanwhile."""

import gc
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sfi_core.engine.graphs.recorder import CudaRecorder, no_collection, refuse_waiting
from sfi_core.engine.maintenance import main_stream
from sfi_core.errors import BackendError
from sfi_core.measure.kernel_bench.timing import CudaClock
from sfi_core.state.side_stream import stream_of
from tests.cuda_clocks import Device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for CUDA")
CUDA = torch.device("cuda:0")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default)  # noqa: SLF001


class Watchful(TorchDispatchMode):
    """Refuses what waits, in the words of PyTorch's synchronization check."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func in WAITS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def modes(monkeypatch) -> list[Any]:
    """List what the check was set to."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


class Looks(torch.nn.Module):
    def __init__(self, look) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> Any:
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
    assert modes == [0, "error", 0]


def test_another_error_stays_as_it_is(modes):
    with pytest.raises(RuntimeError, match=r"^shapes$"), refuse_waiting():
        raise RuntimeError("shapes")
    assert modes == [0, "error", 0]


@pytest.fixture
def captures(monkeypatch, modes) -> list[bool]:
    """Stand for captures; list whether the collector was on within each."""
    Device().install(monkeypatch)
    found: list[bool] = []

    @contextmanager
    def capture(*_: Any, **__: Any):
        yield
        found.append(gc.isenabled())

    class Graph:
        def replay(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return found


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
