"""An operation: one signature, a PyTorch reference, and at times a Triton kernel or loops for numba."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch

from sfi_kernels.compiled import why_not

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Runs the Triton kernel where a tensor is on CUDA, the reference otherwise.

    `op.reference(...)` and `op.triton(...)` name an implementation; neither falls back.
    """

    def __init__(
        self, reference: Callable[P, R], *, triton: str | None = None, numba: str | None = None
    ) -> None:
        """Take the reference and the modules of the others, which have its name there; None for none."""
        self.reference = reference
        self._triton_module, self._numba_module = triton, numba
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel if any tensor is on CUDA: the host pages of a recall are not."""
        values = (*args, *kwargs.values())
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
        return (self.triton if on_cuda and self.has_triton else self.reference)(*args, **kwargs)

    def on(self, backend: str) -> Callable[P, R]:
        """Return the implementation of "torch", "triton" or "numba", whatever the device."""
        implementations = {
            "torch": lambda: self.reference,
            "triton": lambda: self.triton,
            "numba": lambda: self.numba,
        }
        return implementations[backend]()

    def fastest(self, backend: str, device: torch.device) -> Callable[P, R]:
        """Return `on(backend)`; on a CPU that has numba, numba's in place of the reference."""
        if backend == "torch" and device.type == "cpu" and not why_not():
            return self.numba
        return self.on(backend)

    @property
    def has_triton(self) -> bool:
        """Whether the op has a Triton kernel at all."""
        return self._triton_module is not None

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The kernel, imported on first use, so that references run where Triton is missing."""
        return self._from(self._triton_module, "Triton kernel")

    @cached_property
    def numba(self) -> Callable[P, R]:
        """The function over numba's loops, imported on first use."""
        return self._from(self._numba_module, "loops for numba")

    def _from(self, module: str | None, kind: str) -> Callable[P, R]:
        name = self.reference.__name__
        if module is None:
            raise NotImplementedError(f"{name} has no {kind}")
        return cast("Callable[P, R]", getattr(import_module(module), name))
