"""The backend that runs a transformers model."""

from collections.abc import Callable
from typing import Any

from sfi_core.engine.backends.registry import check_shapes
from sfi_core.errors import BackendError
from sfi_core.state.layer_shape import LayerShape
from sfi_kernels.launch import KernelLimitError


def resolve_backend(
    backend: str, model: Any, shapes: Callable[[], list[LayerShape]], page_size: int | None
) -> str:
    """Return the backend that runs a model, "torch" or "triton"; `shapes` finds out its layers' shapes.

    "auto" takes triton on a CUDA device where its kernels can run the model, else torch.

    Raises:
        BackendError: "triton" was asked for and cannot run the model here; with the limit.
    """
    if backend == "torch" or (backend == "auto" and model.device.type != "cuda"):
        return "torch"
    try:
        _check_devices(model)
        check_shapes(shapes(), page_size, model.dtype, model.device)
    except KernelLimitError as error:
        if backend == "auto":
            return "torch"
        raise BackendError(str(error)) from error
    return "triton"


def _check_devices(model: Any) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelLimitError(
            f"the triton backend needs the model on one device, got {names}; use the torch backend"
        )
