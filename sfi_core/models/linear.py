"""Weight matrices on a CPU, where PyTorch's own product is slow; other ways give the same sums in float32.

- For a few rows, as in a decoding step, a matrix is read as it lies, in loops that numba compiles: float32,
    16 bits where the CPU has no arithmetic for them, and for a single row anyway.
- For many rows, as in a prompt, on a CPU without arithmetic of a 16-bit dtype, any x86 without AVX-512, pieces of the
    matrix become float32.

`block_linear.BlockLinear` does both with blocks of 8 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from platform import machine
from typing import Any

import torch
from torch.nn.functional import linear

from sfi_core.distributed.ranks import ranks_of
from sfi_core.machine.private import multiplies_natively
from sfi_core.machine.threads import served, serving
from sfi_kernels.compiled import KINDS, why_not
from sfi_kernels.tables import BLOCK, FEW, PIECE, row_of

LARGE = 1 << 16  # weights from which on a compiled product pays


class RowLinear(torch.nn.Linear):
    """A `Linear` that multiplies rows in float32 and rounds once, in another way than PyTorch where that is quicker."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., O], in the input's dtype."""
        slow = crawls(self.weight.dtype)
        rows = input.numel() // self.in_features
        few = FEW if slow or self.weight.dtype == torch.float32 else 1
        if not rows or not served.get():
            return super().forward(input)
        if rows <= few and compiles(self):
            return self._few(input)
        return self._many(input) if slow and rows >= FEW else super().forward(input)

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        from sfi_kernels.numba_ops import multiply_few  # noqa: PLC0415 - brings numba

        weight = self.weight.detach()
        out = multiply_few(row_of(KINDS[weight.dtype], weight.shape, weight), rows.reshape(-1, self.in_features))
        if self.bias is not None:
            out += self.bias.detach()
        return out.to(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        wide, outs = rows.float(), []
        for start in range(0, self.out_features, PIECE):
            piece = slice(start, start + PIECE)
            bias = None if self.bias is None else self.bias[piece].float()
            outs.append(linear(wide, self.weight[piece].float(), bias).to(rows.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def crawls(dtype: torch.dtype) -> bool:
    """Say whether PyTorch multiplies matrices of a dtype on this CPU without a library made for it."""
    if machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return not multiplies_natively(dtype)


def compiles(module: torch.nn.Linear) -> bool:
    """Say whether compiled loops multiply a few rows by a layer's matrix as it lies."""
    weight = module.weight
    lies_right = weight.dtype in KINDS and weight.is_contiguous() and module.in_features % BLOCK == 0
    return lies_right and weight.numel() >= LARGE and not why_not()


@contextmanager
def quick_linears(model: Any) -> Iterator[None]:
    """Inside, let a model's `Linear` layers multiply in another way where that is faster, for this thread."""
    linears = [] if ranks_of(model).size > 1 else [m for m in model.modules() if type(m) is torch.nn.Linear]
    changed = [m for m in linears if m.weight.device.type == "cpu" and (crawls(m.weight.dtype) or compiles(m))]
    for module in changed:
        module.__class__ = RowLinear
    try:
        with serving():
            yield
    finally:
        for module in changed:
            module.__class__ = torch.nn.Linear
