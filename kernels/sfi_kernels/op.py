"""An operation: one signature, a PyTorch reference, a Triton kernel, and at times loops for numba, and its checks."""

from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch

from sfi_kernels.compiled import Failure

P = ParamSpec("P")
R = TypeVar("R")
IMPLEMENTATIONS = {"torch": "reference", "triton": "triton", "numba": "numba"}  # by backend


class Op(Generic[P, R]):
    """Runs the Triton kernel where a tensor is on CUDA, the reference otherwise.

    `op.reference(...)`, `op.triton(...)` and `op.numba(...)` name an implementation; none falls back. They have one
    name, in the modules `reference` and `triton` of the op's package and in `numba_ops`.
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
        """Return the implementation of "torch", "triton" or "numba", whatever the device.

        Where numba turns out not to compile its loops, the reference computes in their place.
        """
        return self._compiled if backend == "numba" else cast("Callable[P, R]", getattr(self, IMPLEMENTATIONS[backend]))

    def _compiled(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self.numba(*args, **kwargs)
        except Exception:
            if not Failure.why:
                raise
        return self.reference(*args, **kwargs)

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


def check_shapes(spec: str, *tensors: torch.Tensor, **sizes: int) -> None:
    """Raise `ValueError` unless tensors have the shapes of `spec`, say `check_shapes("key BHTD, start B", key, start)`.

    A letter has one size in all tensors, that of `sizes` if it is there; a small letter has any size.
    """
    for (name, letters), tensor in zip(_parsed(spec), tensors, strict=True):
        got = tensor.shape
        if len(got) == len(letters):
            # a loop, not all(...): every op of every step comes here
            for letter, have in zip(letters, got, strict=True):
                if letter in sizes and sizes[letter] != have:
                    break
            else:
                sizes.update(zip(letters, got, strict=True))
                continue
        wanted = ", ".join(f"{x}={sizes[x]}" if x in sizes else x.upper() for x in letters)
        raise ValueError(f"{name} must be [{wanted}], got {list(got)}")


@cache
def _parsed(spec: str) -> list[tuple[str, ...]]:
    # names with their letters
    return [tuple(part.rsplit(" ", 1)) for part in spec.split(", ")]


def check_pages(like: torch.Tensor, name: str, **pages: torch.Tensor) -> None:
    """Raise `ValueError` unless pages, of any strides, have the dtype and device of `like`, called `name`.

    Pages may also be in pinned host memory, which kernels read over the link.
    """
    for label, tensor in pages.items():
        if tensor.dtype != like.dtype:
            raise ValueError(f"{label} must have the dtype of {name}, {like.dtype}, got {tensor.dtype}")
        if tensor.device != like.device and not tensor.is_pinned():
            raise ValueError(f"{label} must be on {like.device} like {name}, got {tensor.device}")


def check_same(like: torch.Tensor, name: str, **tensors: torch.Tensor) -> None:
    """Raise `ValueError` unless tensors are contiguous, with dtype and device of `like`, called `name`."""
    for label, tensor in tensors.items():
        check_pages(like, name, **{label: tensor})
        if not tensor.is_contiguous():
            raise ValueError(f"{label} must be contiguous, got strides {tensor.stride()}")


def row_distance(tensor: torch.Tensor, name: str, width: int) -> int:
    """Return the numbers between contiguous rows of `width`, parts of a wider product, say.

    Raise `ValueError` unless there is one such distance.
    """
    try:
        distance, step = tensor.view(-1, width).stride()
    except RuntimeError:
        distance = step = 0
    if step != 1:
        raise ValueError(f"{name} must have rows at one distance, got strides {tensor.stride()}")
    return distance


def check_int32(device: torch.device, **tensors: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensors are contiguous int32 on `device`."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
