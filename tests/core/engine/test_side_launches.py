"""How many launches a layer makes on the side at a replayed slow step: each costs a few microseconds."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

import sfi_core
from sfi_core import EngineOptions, SfiConfig
from sfi_core.engine.graphs import layer as graphs_layer
from sfi_kernels.launch import name_of
from tests.core.conftest import tiny_qwen3
from tests.fake_graph import FakeRecorder, memory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counted on CPU tensors")
CONFIG = SfiConfig(slow_start=1, min_gap=0, sink=2, recent=8, budget=6, t_max=1, window_prefill=4, trigger_token_ids=())
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided")


class Launches(TorchDispatchMode):
    """Names of Triton kernels, and of aten ops that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        made = func(*args, **kwargs or {})
        given, outs = (
            {memory(x) for x in tree_leaves(some) if isinstance(x, torch.Tensor)} for some in ((args, kwargs), made)
        )
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL and (func._schema.is_mutable or outs - given):  # noqa: SLF001
            self.names.append(name)
        return made


@pytest.fixture
def side_launches(monkeypatch) -> dict[int, list[str]]:
    """Note by layer what the last replayed step recorded on the side."""
    FakeRecorder().install(monkeypatch)
    select, launched = graphs_layer._select, GridExecutor.__call__  # noqa: SLF001
    found: dict[int, list[str]] = {}
    under_way: list[Launches] = []

    def noted(buffers: Any, layer: Any, result: Any) -> None:
        with Launches() as launches:
            under_way.append(launches)
            select(buffers, layer, result)
            under_way.pop()
        found[layer.index] = launches.names

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        if under_way:
            under_way[-1].names.append(name_of(executor.fn))
        with _disable_current_modes():
            launched(executor, *args, **kwargs)

    monkeypatch.setattr(graphs_layer, "_select", noted)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return found


def test_a_layer_makes_few_launches_on_the_side(side_launches):
    """One copy of the key norms, five launches of the Selector and two for a span, top-k's five, and pack."""
    sfi_core.generate(
        tiny_qwen3(layers=2), None, [list(range(3, 25))], CONFIG.replace(span=10), page_size=16,
        max_new_tokens=3, stop_token_ids=(), engine=EngineOptions(backend="triton", graphs=True),
    )  # fmt: skip
    first, second = side_launches[0], side_launches[1]
    assert {"pack", "selector_refine", "top_k_write"} <= set(second)
    assert len(second) <= 14, second
    assert len(first) <= 17, first  # an index for all layers
