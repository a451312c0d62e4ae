"""Weight matrices on a CPU: layers of blocks, and `Linear` layers where PyTorch's own product is slow.

Other ways than PyTorch's give the same sums in float32:

- For a few rows, as in a decoding step, a matrix is read as it lies, in loops that numba compiles: blocks, float32,
    16 bits where the CPU has no arithmetic for them, and for a single row anyway.
- For many rows, as in a prompt, pieces of a matrix of blocks become float32; so do those of a 16-bit dtype on a CPU
    without arithmetic for it, any x86 without AVX-512.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from platform import machine
from typing import Any

import torch
from torch.nn.functional import linear

from sfi_core.distributed.ranks import ranks_of
from sfi_core.errors import BackendError
from sfi_core.machine.private import multiplies_natively
from sfi_core.machine.text import first_line
from sfi_core.machine.threads import served, serving
from sfi_core.models.blocks import Blocks
from sfi_kernels.compiled import KINDS, why_not
from sfi_kernels.tables import BIAS, BLOCK, FEW, PIECE, row_of

LARGE = 1 << 16  # weights from which on a compiled product pays


@dataclass(slots=True)
class Weights:
    """For reports, `model.sfi_weights`: matrices of blocks by type, and why others, by name, "" for all, are floats."""

    blocks: dict[str, int] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)


class BlockLayer(torch.nn.Module):
    """What both have: `blocks`, and float32 weights made of them at each access."""

    blocks: Blocks

    @property
    def weight(self) -> torch.Tensor:
        """The weights as float32, [O, I], made anew at each access."""
        return self.blocks.floats()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        there = fn(torch.empty(0))
        if there.device.type != "cpu" or there.dtype != torch.float32:
            where = f"{str(there.dtype).removeprefix('torch.')} on {there.device.type}"
            raise BackendError(f"a model of weight blocks is float32 on a CPU, got {where}; load it so from the start")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class BlockLinear(BlockLayer, torch.nn.Linear):  # type: ignore[override]
    """A `Linear` of float32 rows whose weights are `blocks`, for inference."""

    def __init__(self, blocks: Blocks, bias: torch.nn.Parameter | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = blocks.shape
        self.blocks, self.bias = blocks, bias  # type: ignore[assignment]

    @property
    def matrix(self) -> Any:
        """The matrix with its bias as `sfi_kernels.matrix` lays it out; this layer keeps the tensors."""
        row = self.blocks.row.copy()
        row[BIAS] = 0 if self.bias is None else self.bias.data_ptr()
        return row

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., O]."""
        from sfi_kernels.numba_ops import multiply  # noqa: PLC0415 - brings numba

        return multiply(self.matrix, input.reshape(-1, self.in_features), self.bias).view(
            *input.shape[:-1], self.out_features
        )


class BlockEmbedding(BlockLayer, torch.nn.Embedding):  # type: ignore[override]
    """An `Embedding` whose rows are widened where they are asked for; some models scale them."""

    def __init__(self, blocks: Blocks, scale: torch.Tensor | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = blocks.shape
        self.blocks, self.scale = blocks, scale

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return the rows of token ids [...], [..., I]."""
        rows = self.blocks.floats(input.reshape(-1))
        return (rows if self.scale is None else rows * self.scale).view(*input.shape, self.embedding_dim)


def round_weights(model: Any) -> None:
    """Round a float32 model's `Linear` matrices on a CPU to 8 bits, in place; widths of no multiple of 32 stay."""
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module.in_features % BLOCK == 0:
            model.set_submodule(name, BlockLinear(Blocks.rounded(module.weight), module.bias))
    model.sfi_weights = Weights({"int8": sum(isinstance(module, BlockLinear) for module in model.modules())})


def why_no_blocks() -> str:
    """Return why no layer of blocks runs in this process, "" if they do."""
    if why := why_not():
        return f"numba: {why}"
    try:
        BlockLinear(Blocks.rounded(torch.ones(1, 32)))(torch.ones(1, 32))
    except Exception as error:  # noqa: BLE001 - numba's own, of many kinds
        return f"numba: {first_line(error)}"
    return ""


class RowLinear(torch.nn.Linear):
    """A `Linear` that multiplies rows in float32 and rounds once, in another way than PyTorch where that is quicker."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., O], in the input's dtype."""
        slow, rows = crawls(self.weight.dtype), input.numel() // self.in_features
        few = FEW if slow or self.weight.dtype == torch.float32 else 1
        if not rows or not served.get():
            return super().forward(input)
        if rows <= few and compiles(self):
            from sfi_kernels.numba_ops import multiply_few  # noqa: PLC0415 - brings numba

            weight = self.weight.detach()
            out = multiply_few(row_of(KINDS[weight.dtype], weight.shape, weight), input.reshape(-1, self.in_features))
            if self.bias is not None:
                out += self.bias.detach()
            return out.to(input.dtype).view(*input.shape[:-1], self.out_features)
        if not slow or rows < FEW:
            return super().forward(input)
        wide, outs = input.float(), []
        for start in range(0, self.out_features, PIECE):
            piece = slice(start, start + PIECE)
            bias = None if self.bias is None else self.bias[piece].float()
            outs.append(linear(wide, self.weight[piece].float(), bias).to(input.dtype))
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
