"""Layers whose weights are blocks, on a CPU: a matrix product, and an embedding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.errors import BackendError
from sfi_core.machine.text import first_line
from sfi_core.models.blocks import Blocks
from sfi_kernels.compiled import why_not
from sfi_kernels.tables import BIAS, BLOCK


@dataclass(slots=True)
class Weights:
    """How a loaded model keeps its weights, in `model.sfi_weights`: for reports.

    `blocks` counts its matrices of blocks by their type in the file; `floats` has why others are none, by name, and
    under "" why none is.
    """

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
        """The matrix with its bias as `sfi_kernels.tables` lays it out; this layer keeps the tensors."""
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
    """Round the matrices of a float32 model's `Linear` layers on a CPU to 8 bits, in place and for good.

    Layers whose width is no multiple of 32 stay as they are, and so does the embedding.
    """
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
