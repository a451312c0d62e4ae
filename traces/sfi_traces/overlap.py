"""How much two supports share, for many heads at once.

A set is a row of an int array: its positions in ascending order, then -1 as padding; leading dimensions
agree.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Positions of two sets, counted: arrays of one number for each pair.

    Attributes:
        first: Positions in the first set.
        second: Positions in the second set.
        both: Positions in both sets.
    """

    first: Ints
    second: Ints
    both: Ints

    @classmethod
    def of(cls, first: Ints, second: Ints) -> Self:
        """Compare [..., K] with [..., M]."""
        joined = np.concatenate([first, second], -1)
        joined.sort(
            axis=-1, kind="stable"
        )  # merges two ascending runs; what both have lies side by side
        met = (joined[..., 1:] == joined[..., :-1]) & (joined[..., 1:] >= 0)
        return cls(size(first), size(second), np.asarray(np.count_nonzero(met, axis=-1)))

    @property
    def coefficient(self) -> Floats:
        """The share of the smaller set that is in the other (SyncKV); NaN where one is empty."""
        return _share(self.both, np.minimum(self.first, self.second))

    @property
    def jaccard(self) -> Floats:
        """The share of the union that is in both; NaN where both are empty."""
        return _share(self.both, self.first + self.second - self.both)


def size(index: Ints) -> Ints:
    """Count the positions of each set: [...] of [..., K]."""
    return np.asarray((index >= 0).sum(-1))


def _share(part: Ints, whole: Ints) -> Floats:
    nothing = np.full(part.shape, np.nan, np.float32)
    return np.divide(part, whole, out=nothing, where=whole > 0)
