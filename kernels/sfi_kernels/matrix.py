"""A weight matrix as compiled loops take it: addresses and sizes in a row of int64."""

from typing import Any

import numpy as np
import torch

NUMBERS, SCALES, FINE_SCALES, MINIMA, FINE_MINIMA, OUT, IN, KIND, BIAS = range(9)  # places; an address of 0 is none
SIZE = 9
FEW = 8  # rows up to which a matrix is read as it lies, in compiled loops
FEW_OF_BLOCKS = 32  # the same of a matrix of blocks, which would have to become floats first
PIECE = 512  # rows of the matrix that are widened at once for more: they stay in cache
BLOCK = 32  # numbers of a block; as a kind, blocks of 8-bit numbers
FOUR, FIVE, FOUR_K, FIVE_K, SIX_K = range(33, 38)  # kinds of blocks; those below 3 are of `compiled.KINDS`
LAYOUTS = {  # numbers in a word, scales of a block, and whether those are int8 times one of eight blocks
    BLOCK: (1, 1, False), FOUR: (4, 1, False), FIVE: (3, 1, False),
    FOUR_K: (4, 1, True), FIVE_K: (3, 1, True), SIX_K: (1, 2, True),
}  # fmt: skip
MIDDLES = {BLOCK: 0, FOUR: 8, FIVE: 16, FOUR_K: 0, FIVE_K: 0, SIX_K: 0}  # taken off numbers that have no minimum
TILE = 8  # rows of a matrix whose numbers lie together


def row_of(kind: int, shape: tuple[int, ...], *parts: torch.Tensor | None) -> Any:
    """Return the row of a contiguous matrix [O, I] on the CPU, without bias; `parts` come in the places' order."""
    row = np.zeros(SIZE, np.int64)
    row[OUT], row[IN], row[KIND] = *shape, kind
    for place, part in enumerate(parts):
        row[place] = 0 if part is None else part.data_ptr()
    return row
