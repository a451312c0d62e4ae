"""The backends: which there are, which one runs, and what it cannot take."""

from collections.abc import Callable
from typing import Any

from sfi_core.engine.backends.triton import TritonStep
from sfi_core.engine.graphs.layer import StaticStep
from sfi_core.engine.layer import LayerStep
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.state.layer_shape import LayerShape
from sfi_kernels.attention_tile.shape import check_limits
from sfi_kernels.launch import KernelLimitError

PAGE_SIZE = 64  # tokens of a page under the triton backend: one tile
STEPS = {"torch": LayerStep, "triton": TritonStep}


def layer_step(run: Run, layer: int, **options: Any) -> LayerStep:
    """Make the layer's step on the run's backend; arguments are `LayerStep`'s."""
    fixed = run.fixed is not None and run.forward is not None and run.forward.decode
    kind = StaticStep if fixed else STEPS[run.cache.backend]
    return kind(run, layer, **options)


def resolve_backend(
    backend: str, model: Any, shapes: Callable[[], list[LayerShape]], page_size: int | None
) -> str:
    """Say which backend runs a model: "torch" or "triton".

    Args:
        backend: "auto" takes triton on a CUDA device where its kernels can run the model, else torch.
        model: The model.
        shapes: Finds out its layers' shapes.
        page_size: Tokens of a page; None is the backend's own.

    Raises:
        BackendError: "triton" was asked for and cannot run the model here; with the limit.
    """
    if backend == "torch" or (backend == "auto" and model.device.type != "cuda"):
        return "torch"
    try:
        _check(model, shapes(), page_size)
    except KernelLimitError as error:
        if backend == "auto":
            return "torch"
        raise BackendError(str(error)) from error
    return "triton"


def _check(model: Any, shapes: list[LayerShape], page_size: int | None) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelLimitError(
            f"the triton backend needs the model on one device, got {names}; use the torch backend"
        )
    for shape in shapes:
        if shape.window is None:
            check_limits(
                shape.key_width,
                shape.value_width,
                page_size or PAGE_SIZE,
                model.dtype,
                model.device,
            )
