"""Linear modules whose products are one, and which rows kernels take."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from sfi_core.machine.private import has_hooks
from sfi_kernels.products import project


class Product:
    """Linear modules that project the same rows, [..., K], to N numbers each, as one product.

    With few tokens a product takes as long as its weights take to read, and a GPU reads one large matrix faster than
    several small ones. So their weights, [N, K], are moved behind each other, for good: each is then a view of one
    tensor, with its numbers unchanged. They stay apart where they are not all plain, or memory for the move is lacking.
    """

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._modules = modules
        self._weight_NK: torch.Tensor | None = None
        self._bias_N: torch.Tensor | None = None
        linears = [linear for linear in modules if type(linear) is torch.nn.Linear and "forward" not in vars(linear)]
        biases = [linear.bias.detach() for linear in linears if isinstance(linear.bias, torch.Tensor)]
        if len(linears) < len(modules) or len(biases) not in (0, len(modules)):
            return
        self._weight_NK = _together([linear.weight for linear in linears])
        self._widths = [linear.out_features for linear in linears]
        if biases and self._weight_NK is not None:
            self._bias_N = torch.cat(biases)

    def __call__(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Project rows, [..., K]; return each module's own, [..., N], maybe as views of one tensor."""
        if self._weight_NK is None or torch.is_grad_enabled() or any(map(has_hooks, self._modules)):
            return [module(rows) for module in self._modules]
        return self.parts(linear(rows, self._weight_NK, self._bias_N))

    def parts(self, out: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each module's part of all numbers, [..., N of all]."""
        return torch.split(out, self._widths, -1)

    def takes(self, rows: torch.Tensor) -> bool:
        """Say whether `few` can multiply rows."""
        return self._weight_NK is not None and takes(rows, self._weight_NK) and not any(map(has_hooks, self._modules))

    def few(self, rows: torch.Tensor, **around: Any) -> torch.Tensor:
        """Multiply up to 16 rows by a kernel of ours, with what stands `around` the product; see `project`."""
        assert self._weight_NK is not None, "takes the rows"
        return project.triton(rows, self._weight_NK, self._bias_N, **around)


def _together(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    # the tensor that holds all, one after the other
    first = weights[0]
    kinds = {(type(weight), weight.dtype, weight.device, weight.shape[1], weight.is_contiguous()) for weight in weights}
    if kinds != {(torch.nn.Parameter, first.dtype, first.device, first.shape[1], True)}:
        return None
    if not _adjacent(weights):
        try:
            whole = torch.cat([weight.data for weight in weights])
        except torch.OutOfMemoryError:
            return None
        for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
            weight.data = part
        if first.device.type == "cuda":
            torch.cuda.empty_cache()  # the next layer's needs the room of this one's old weights
    return first.data.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def _adjacent(weights: Sequence[torch.Tensor]) -> bool:
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return one_storage and [weight.data_ptr() for weight in weights[1:]] == ends[:-1]


def takes(*tensors: torch.Tensor, rows: Sequence[torch.Tensor] = ()) -> bool:
    """Say whether kernels take contiguous tensors and projected rows: of one dtype and device, without gradients."""
    like = (*tensors, *rows)[0]
    alike = all(x.dtype == like.dtype and x.device == like.device for x in (*tensors, *rows))
    return alike and not torch.is_grad_enabled() and all(x.is_contiguous() for x in tensors)
