"""Overlap of sets of positions, for many heads at once.

A set is a row of an int array: its positions in ascending order, then -1 as padding. Leading dimensions
agree.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Sizes of pairs of sets, and of their intersections: one number for each pair."""

    first: Ints
    second: Ints
    both: Ints

    @classmethod
    def of(cls, first: Ints, second: Ints) -> Self:
        """Compare [..., K] with [..., M]."""
        joined = np.concatenate([first, second], -1)
        joined.sort(axis=-1, kind="stable")  # equal positions become neighbors
        met = (joined[..., 1:] == joined[..., :-1]) & (joined[..., 1:] >= 0)
        return cls(size(first), size(second), np.asarray(np.count_nonzero(met, axis=-1)))

    @property
    def coefficient(self) -> Floats:
        """|A and B| / min(|A|, |B|), as in SyncKV; NaN where a set is empty."""
        return _share(self.both, np.minimum(self.first, self.second))

    @property
    def jaccard(self) -> Floats:
        """|A and B| / |A or B|; NaN where both sets are empty."""
        return _share(self.both, self.first + self.second - self.both)


def size(index: Ints) -> Ints:
    """Count the positions of each set: [...] of [..., K]."""
    return np.asarray((index >= 0).sum(-1))


def _share(part: Ints, whole: Ints) -> Floats:
    nothing = np.full(part.shape, np.nan, np.float32)
    return np.divide(part, whole, out=nothing, where=whole > 0)


def padded(
    lists: pa.ListArray | pa.ChunkedArray, empty: float = -1, width: int | None = None
) -> npt.NDArray[Any]:
    """Pad lists to rows, [N, width]; nulls are empty lists.

    Without a width the rows are as wide as the longest list, and at least 1.
    """
    length = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
    values = np.asarray(pc.list_flatten(lists))
    wide = int(length.max(initial=1)) if width is None else width
    found = np.full((len(length), wide), empty, values.dtype)
    found[np.arange(wide) < length[:, None]] = values
    return found
