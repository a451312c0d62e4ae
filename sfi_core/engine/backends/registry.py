"""The backends: their attention, and the checks of what they can run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sfi_core.engine.backends import torch as torch_backend
from sfi_core.engine.backends import triton as triton_backend
from sfi_core.engine.layer import Layer
from sfi_core.engine.refresh import end_prompt, layer_context
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError, unknown
from sfi_core.settings.engine import BACKENDS, PAGE_SIZE
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels.attention_tile.shape import check_limits
from sfi_kernels.launch import KernelLimitError, check_device

ATTEND = {"torch": torch_backend.attend, "triton": triton_backend.attend}


def attend(run: Run, index: int, query_BHGTD: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend in a layer, on the run's backend or by the run's CUDA graphs.

    The store already holds the layer's new keys and values. Queries are grouped by KV head; a request's own
    are the last `count` of T. `options` are `scale`, `soft_cap`, `sink_HG` and `new` of `Layer`. Return the
    outputs, [B, H, G, T, E].
    """
    layer = Layer(run, index, **options)
    if run.attend is not None:
        return run.attend(layer, query_BHGTD)
    if run.store.backend == "triton":  # also before host memory's tokens are chosen, which must be the same
        prepare(layer, query_BHGTD.shape[2], layer.batch_pass.fast, run.requests)
    if run.store.whole_on_device:
        return ATTEND[run.store.backend](layer, query_BHGTD)
    # tokens in host memory come block by block, request by request; the ops are still the backend's
    with run.launches(index):
        return torch_backend.attend(layer, query_BHGTD)


def prepare(layer: Layer, group: int, rows: Sequence[int], states: Sequence[RequestState]) -> None:
    """Let the policy learn what some requests lack for the step that `states` have entered.

    From what was there before the step, so that a CUDA graph can hold the step, and without waiting for the
    device. `group` are the query heads of a KV head; where no queries were kept, the last keys stand for them.
    """
    run, policy = layer.run, layer.run.policy
    if not policy.chooses or layer.left_dense:
        return
    for row in rows:
        if policy.lacks(states[row], run.notes[states[row].request, layer.index]):
            before = replace(states[row], length=states[row].length - 1)
            first = max(0, before.length - policy.config.window_prefill)
            key_1HWD = run.store.keys(layer.index, row, first, before.length)
            query_1HGWD = key_1HWD[:, :, None].expand(-1, -1, group, -1, -1)
            context = layer_context(layer, (row,), query_1HGWD)
            with run.launches(layer.index):
                policy.select_after(replace(context, states=(before,)))


def end_prompts(run: Run, index: int, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor, **options: Any) -> None:
    """Select and call the watchers in a layer whose prompts the host has attended itself.

    For a pass that only reads prompts; the arguments are those of `attend`, and its result `out_BHGTE`.
    """
    layer = Layer(run, index, **options)
    run.meter.count("host.prefill_attention", len(layer.batch_pass.prompts))
    with run.launches(index):
        end_prompt(layer, query_BHGTD)
        layer.finish(query_BHGTD, out_BHGTE)


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that is unknown (`ConfigError`) or cannot run on a device (`BackendError`)."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "triton":
        try:
            check_device(device)
        except KernelLimitError as error:
            raise BackendError(str(error)) from error


def check_shapes(shapes: Sequence[LayerShape], page_size: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `KernelLimitError` for layers that the Triton kernels cannot take."""
    for shape in shapes:
        if shape.window is None:
            check_limits(shape.key_width, shape.value_width, page_size or PAGE_SIZE, dtype, device)
