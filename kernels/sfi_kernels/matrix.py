"""A weight matrix as compiled loops take it: addresses and sizes in a row of int64."""

from typing import Any

import numpy as np
import torch

NUMBERS, SCALES, MINIMA, OUT, IN, KIND, BIAS = range(7)  # places; an address of 0 is none
SIZE = 7
FEW = 8  # rows up to which a matrix is read as it lies, in compiled loops
PIECE = 512  # rows of the matrix that are widened at once for more: they stay in cache
BLOCK = 32  # numbers of a block, which have one scale; as a kind, blocks of it
FINE = 33  # the kind of blocks with two scales; kinds below 3 are those of `numpy_views.KINDS`


def row_of(kind: int, number_OI: torch.Tensor, *parts: torch.Tensor | None) -> Any:
    """Return the row of a contiguous matrix on the CPU, without bias; `parts` are scales and minima."""
    row = np.zeros(SIZE, np.int64)
    row[OUT], row[IN], row[KIND] = *number_OI.shape, kind
    for place, part in enumerate((number_OI, *parts)):
        row[place] = 0 if part is None else part.data_ptr()
    return row
