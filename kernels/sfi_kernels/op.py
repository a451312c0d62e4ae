"""An operation: one signature, a PyTorch reference, a Triton kernel, and at times loops for numba."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
IMPLEMENTATIONS = {"torch": "reference", "triton": "triton", "numba": "numba"}  # by backend


class Op(Generic[P, R]):
    """Runs the Triton kernel where a tensor is on CUDA, the reference otherwise.

    `op.reference(...)`, `op.triton(...)` and `op.numba(...)` name an implementation; none falls back. They
    have one name, in the modules `reference` and `triton` of the op's package and in `numba_ops`.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel if any tensor is on CUDA: the host pages of a recall are not."""
        values = (*args, *kwargs.values())
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
        return (self.triton if on_cuda else self.reference)(*args, **kwargs)

    def on(self, backend: str) -> Callable[P, R]:
        """Return the implementation of "torch", "triton" or "numba", whatever the device."""
        return cast("Callable[P, R]", getattr(self, IMPLEMENTATIONS[backend]))

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The kernel, imported on first use, so that references run where Triton is missing."""
        return self._imported(f"{self.reference.__module__.rpartition('.')[0]}.triton")

    @cached_property
    def numba(self) -> Callable[P, R]:
        """The function over numba's loops, imported on first use."""
        return self._imported("sfi_kernels.numba_ops")

    def _imported(self, module: str) -> Callable[P, R]:
        return cast("Callable[P, R]", getattr(import_module(module), self.reference.__name__))
