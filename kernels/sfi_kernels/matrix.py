"""A weight matrix as compiled loops take it: addresses and sizes in a row of int64."""

from typing import Any

import numpy as np
import torch

NUMBERS, SCALES, MINIMA, OUT, IN, KIND, BIAS = range(7)  # places; an address of 0 is none
SIZE = 7
FEW = 8  # rows up to which a matrix is read as it lies, in compiled loops
PIECE = 512  # rows of the matrix that are widened at once for more: they stay in cache
BLOCK = 32  # numbers of a block, which have one scale; as a kind, blocks of 8-bit numbers
FINE, FOUR, FIVE = 33, 34, 35  # kinds: with two scales, of 4 and 5 bits; those below 3 are of `numpy_views.KINDS`
LAYOUTS = {BLOCK: (1, 1), FINE: (1, 2), FOUR: (4, 1), FIVE: (3, 1)}  # numbers in a word, scales of a block
TILE = 8  # rows of a matrix whose numbers lie together


def row_of(kind: int, shape: tuple[int, ...], *parts: torch.Tensor | None) -> Any:
    """Return the row of a contiguous matrix [O, I] on the CPU, without bias; `parts` are numbers, scales and minima."""
    row = np.zeros(SIZE, np.int64)
    row[OUT], row[IN], row[KIND] = *shape, kind
    for place, part in enumerate(parts):
        row[place] = 0 if part is None else part.data_ptr()
    return row
