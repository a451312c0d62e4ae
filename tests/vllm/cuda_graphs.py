"""CUDA graphs on a CPU: vLLM's own dispatch, padding, capture and replay, over a tape in the graph's place.

vLLM's platform for CPUs turns graphs off; `graphs_on` turns them on again for batches of decoding rows, and lets the
tape of `tests/fake_graph.py` stand for `torch.cuda.CUDAGraph`: it refuses whatever a graph cannot hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.compilation import cuda_graph
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.fake_graph import FakeRecorder, Tape

SIZES = [1, 2, 4]


class TapeGraph:
    """Stands for `torch.cuda.CUDAGraph`; `recorder` counts."""

    recorder: FakeRecorder

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def replay(self) -> None:
        """Play the tape."""
        assert self.tape is not None
        self.recorder.plays += 1
        self.tape.play()


@contextmanager
def recorded(graph: TapeGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Stand for `torch.cuda.graph`."""
    graph.recorder.tapes += 1
    with graph.recorder.refusing(Tape()) as graph.tape:
        yield


def graphs_on(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Let engines that are made from now on use graphs; call `capture` before they run."""
    recorder = TapeGraph.recorder = FakeRecorder()
    recorder.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(CpuPlatform, "graph_pool_handle", lambda _: (0, 0), raising=False)
    monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
    for module in (cuda_graph, cudagraph_utils):
        monkeypatch.setattr(module, "current_stream", lambda: None)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda **_: nullcontext())
    settle = CpuPlatform.check_and_update_config.__func__

    def settle_with_graphs(cls: type[CpuPlatform], vllm_config: Any) -> None:
        settle(cls, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, SIZES[-1]

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(settle_with_graphs))
    return recorder


def capture(llm: LLM) -> None:
    """Capture graphs as a worker on a GPU does once its cache is there.

    Attention is called directly: of an operator of vLLM's the tape would hold the Python inside.
    """
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        layer.use_direct_call = True
    if not isinstance(runner, GPUModelRunner):  # the second
        runner.cudagraph_manager.capture(
            runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors, runner.block_tables,
            runner.attn_groups, runner.kv_cache_config,
        )  # fmt: skip
        return
    runner.model = cuda_graph.CUDAGraphWrapper(runner.model, runner.vllm_config, runtime_mode=CUDAGraphMode.FULL)
    set_cudagraph_capturing_enabled(True)
    for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
        runner._capture_cudagraphs(descriptors, mode)  # noqa: SLF001 - `capture_model` asks for streams, too
    set_cudagraph_capturing_enabled(False)
