"""An operation: one signature, a PyTorch reference, and at times a Triton kernel."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Runs the Triton kernel where a tensor is on CUDA, the reference otherwise.

    `op.reference(...)` and `op.triton(...)` name an implementation; neither falls back.
    """

    def __init__(self, reference: Callable[P, R], *, triton: str | None = None) -> None:
        """Take the reference and the module of the kernel, which has the same name; None for no kernel."""
        self.reference = reference
        self._triton_module = triton
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel if any tensor is on CUDA: the host pages of a recall are not."""
        values = (*args, *kwargs.values())
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
        return (self.triton if on_cuda and self.has_triton else self.reference)(*args, **kwargs)

    def on(self, backend: str) -> Callable[P, R]:
        """Return the implementation of a backend, "torch" or "triton", whatever the device."""
        return {"torch": lambda: self.reference, "triton": lambda: self.triton}[backend]()

    @property
    def has_triton(self) -> bool:
        """Whether the op has a Triton kernel at all."""
        return self._triton_module is not None

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The kernel, imported on first use, so that references run where Triton is missing."""
        if self._triton_module is None:
            raise NotImplementedError(f"{self.reference.__name__} has no Triton kernel")
        module = import_module(self._triton_module)
        return cast("Callable[P, R]", getattr(module, self.reference.__name__))
