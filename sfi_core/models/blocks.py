"""Weight matrices as 8-bit numbers with a scale for 32 or 16 of them: those of a GGUF file, or made of float weights.

All kinds of blocks of a file have one layout, whose products are compiled loops (`sfi_kernels.loops.products`), and
whose numbers, widened, are bit by bit those that gguf unpacks.
"""

from typing import Any, Self

import numpy as np
import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.matrix import BLOCK, FINE, row_of

BYTES = {  # of a block
   "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
}  # fmt: skip
LARGE = 256  # numbers of a block of the K types
NUMBER = 5e-4  # microseconds to unpack one


class Blocks:
    """A matrix [O, I] of int8 `number_OI`, float32 `scale_OB`, and `minimum_OB` of 32 numbers where there are some.

    A weight is number * scale + minimum. `row` has the addresses, as `sfi_kernels.matrix` lays them out.
    """

    def __init__(self, number_OI: torch.Tensor, scale_OB: torch.Tensor, minimum_OB: torch.Tensor | None = None) -> None:
        self.number_OI, self.scale_OB, self.minimum_OB = number_OI, scale_OB, minimum_OB
        self.shape = number_OI.shape
        kind = FINE if scale_OB.shape[1] * BLOCK > number_OI.shape[1] else BLOCK
        self.row = row_of(kind, number_OI, scale_OB, minimum_OB)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies have addresses of their own."""
        return Blocks, (self.number_OI, self.scale_OB, self.minimum_OB)

    def floats(self, index_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return some rows as float32, [N, I], or all; raise `IndexError` for a row that is not there."""
        from sfi_kernels.linear import widen  # noqa: PLC0415 - brings numba

        index_N = torch.arange(self.shape[0]) if index_N is None else index_N
        if len(index_N) and not 0 <= int(index_N.min()) <= int(index_N.max()) < self.shape[0]:
            raise IndexError(f"rows must be in 0 to {self.shape[0] - 1}, got {index_N.tolist()[:8]}")
        return widen(self.row, index_N.long())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.number_OI, self.scale_OB, self.minimum_OB)
        return sum(part.nbytes for part in parts if part is not None)

    @classmethod
    def unpacked(cls, packed: np.ndarray, kind: Any, order: np.ndarray | None = None) -> Self:
        """Take the rows [O, bytes] of a GGUF file, of a type in `BYTES`; `order` puts them elsewhere."""
        from sfi_kernels.loops.unpacking import unpack_numbers  # noqa: PLC0415 - brings numba

        block_OBX = (packed if order is None else packed[order]).reshape(len(packed), -1, BYTES[kind.name])
        width = block_OBX.shape[1] * (LARGE if kind.name[-1] == "K" else BLOCK)
        number_OI = np.empty((len(packed), width), np.int8)
        by_heads(
            lambda begin, end: unpack_numbers(begin, end, int(kind), block_OBX, number_OI), len(packed),
            NUMBER * number_OI.size,
        )  # fmt: skip
        factors = [part.reshape(len(packed), -1) for part in _FACTORS[kind.name](block_OBX)]
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (number_OI, *factors)))

    @classmethod
    def rounded(cls, weight_OI: torch.Tensor) -> Self:
        """Round a matrix of floats to 8 bits, with a scale for 32 numbers."""
        weight_OBX = weight_OI.detach().float().view(len(weight_OI), -1, BLOCK)
        scale_OB = weight_OBX.abs().amax(-1) / 127
        number_OBX = (weight_OBX / scale_OB.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
        return cls(number_OBX.to(torch.int8).view(weight_OI.shape), scale_OB)


def _real(block_OBX: np.ndarray, at: int) -> np.ndarray:
    # a float16 number of each block, as float32
    return block_OBX[..., at : at + 2].copy().view(np.float16).astype(np.float32)


def _scale(block_OBX: np.ndarray) -> list[np.ndarray]:
    return [_real(block_OBX, 0)]


def _scale_and_minimum(block_OBX: np.ndarray) -> list[np.ndarray]:
    return [_real(block_OBX, 0), _real(block_OBX, 2)]


def _eight_scales_and_minima(block_OBX: np.ndarray) -> list[np.ndarray]:
    # of 6 bits: four of each in bytes 4 to 11, of the others four bits in bytes 12 to 15 and two above the first four's
    scale, minimum, both = (block_OBX[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((scale & 63, both & 15 | scale >> 2 & 48), -1)
    minima = np.concatenate((minimum & 63, both >> 4 | minimum >> 2 & 48), -1)
    return [_real(block_OBX, 0) * scales.astype(np.float32), -(_real(block_OBX, 2) * minima.astype(np.float32))]


def _sixteen_scales(block_OBX: np.ndarray) -> list[np.ndarray]:
    return [_real(block_OBX, 208) * block_OBX[..., 192:208].view(np.int8).astype(np.float32)]


_FACTORS = {
    "Q4_0": _scale, "Q5_0": _scale, "Q8_0": _scale, "Q4_1": _scale_and_minimum, "Q5_1": _scale_and_minimum,
    "Q4_K": _eight_scales_and_minima, "Q5_K": _eight_scales_and_minima, "Q6_K": _sixteen_scales,
}  # fmt: skip
