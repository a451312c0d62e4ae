"""Weight matrices as numbers of few bits with a scale for 32 or 16 of them: those of a GGUF file, or of float weights.

A file's kinds of blocks have one of six layouts, whose products are compiled loops (`sfi_kernels.loops.tiles`),
and whose numbers, widened, are bit by bit those that gguf unpacks.
"""

from typing import Any, Self

import numpy as np
import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.tables import BLOCK, FIVE, FIVE_K, FOUR, FOUR_K, LAYOUTS, SIX_K, TILE, row_of

BYTES = {  # of a block
   "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
}  # fmt: skip
LARGE = 256  # numbers of a block of the K types
KINDS = {
    "Q4_0": FOUR, "Q4_1": FOUR, "Q5_0": FIVE, "Q5_1": FIVE, "Q8_0": BLOCK,
    "Q4_K": FOUR_K, "Q5_K": FIVE_K, "Q6_K": SIX_K,
}  # fmt: skip
NUMBER = 5e-4  # microseconds to unpack one


class Blocks:
    """A matrix [O, I]: its numbers, their scales, and their minima where there are some.

    A weight is number * scale + minimum. `kind` says how they lie (`sfi_kernels.loops.tiles`), and `row` has their
    addresses, as `sfi_kernels.tables` lays them out: numbers, scales, fine scales, minima, fine minima.
    """

    def __init__(self, shape: tuple[int, ...], kind: int, *parts: torch.Tensor | None) -> None:
        self.shape, self.kind, self.parts, self.row = shape, kind, parts, row_of(kind, shape, *parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies have addresses of their own."""
        return Blocks, (self.shape, self.kind, *self.parts)

    def floats(self, index_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return some rows as float32, [N, I], or all; raise `IndexError` for a row that is not there."""
        from sfi_kernels.numba_ops import widen  # noqa: PLC0415 - brings numba

        index_N = torch.arange(self.shape[0]) if index_N is None else index_N
        if len(index_N) and not 0 <= int(index_N.min()) <= int(index_N.max()) < self.shape[0]:
            raise IndexError(f"rows must be in 0 to {self.shape[0] - 1}, got {index_N.tolist()[:8]}")
        return widen(self.row, index_N.long())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts if part is not None)

    @classmethod
    def unpacked(cls, packed: np.ndarray, kind: Any, order: np.ndarray | None = None) -> Self:
        """Take the rows [O, bytes] of a GGUF file, of a type in `BYTES`; `order` puts them elsewhere."""
        from sfi_kernels.loops.products import pack_numbers  # noqa: PLC0415 - brings numba

        block_OBX = (packed if order is None else packed[order]).reshape(len(packed), -1, BYTES[kind.name])
        count, width = len(packed), block_OBX.shape[1] * (LARGE if kind.name[-1] == "K" else BLOCK)
        layout = KINDS[kind.name]
        fields = LAYOUTS[layout][0]
        lines = -(-count // TILE), -(-width // (BLOCK * fields)), BLOCK // 2, 2 * TILE
        numbers = np.zeros(lines, np.int8 if fields == 1 else np.int16)
        by_heads(
            lambda begin, end: pack_numbers(begin, end, int(kind), fields, block_OBX, numbers),
            len(numbers), NUMBER * count * width,
        )  # fmt: skip
        factors = _factors(kind.name, block_OBX)
        tiled = (part if part is None else _tiled(part.reshape(count, -1)) for part in factors)
        return cls((count, width), layout, torch.from_numpy(numbers), *tiled)

    @classmethod
    def rounded(cls, weight_OI: torch.Tensor) -> Self:
        """Round a matrix of floats to 8 bits, with a scale for 32 numbers."""
        weight_OBX = weight_OI.detach().float().view(len(weight_OI), -1, BLOCK)
        scale_OB = (weight_OBX.abs().amax(-1) / 127).half()
        number_OBX = (
            weight_OBX / scale_OB.float().clamp(min=torch.finfo(torch.float16).smallest_normal)[..., None]
        ).round()
        number_OPX = number_OBX.clamp(-127, 127).to(torch.int8).view(len(weight_OI), -1, 2)
        return cls(weight_OI.shape, BLOCK, _tiled(number_OPX.numpy()), _tiled(scale_OB.numpy()))


def _tiled(part_OX: np.ndarray) -> torch.Tensor:
    # the same of `TILE` rows next to each other, [T, X, TILE, ...]; those of rows that are not there are 0
    more = np.zeros((-len(part_OX) % TILE, *part_OX.shape[1:]), part_OX.dtype)
    tiles = np.concatenate((part_OX, more)).reshape(-1, TILE, *part_OX.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(tiles.swapaxes(1, 2)))


def _halves(block_OBX: np.ndarray, at: int) -> np.ndarray:
    # a float16 number of each block
    return block_OBX[..., at : at + 2].copy().view(np.float16)


def _factors(kind: str, block_OBX: np.ndarray) -> list[np.ndarray | None]:
    # scales, fine scales, minima, fine minima, as far as the kind has them
    if kind == "Q6_K":
        return [_halves(block_OBX, 208), block_OBX[..., 192:208].view(np.int8)]
    if kind not in ("Q4_K", "Q5_K"):
        return [_halves(block_OBX, 0), *([None, _halves(block_OBX, 2)] if kind[-1] == "1" else [])]
    # of 6 bits: four of each in bytes 4 to 11, of the others four bits in bytes 12 to 15 and two above the first four's
    scale, minimum, both = (block_OBX[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((scale & 63, both & 15 | scale >> 2 & 48), -1)
    minima = np.concatenate((minimum & 63, both >> 4 | minimum >> 2 & 48), -1)
    return [_halves(block_OBX, 0), scales.view(np.int8), -_halves(block_OBX, 2), minima.view(np.int8)]
