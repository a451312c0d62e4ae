"""Overlap of sets of positions. A set is a row of an int array: ascending positions, then -1 as padding."""

from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BLOCK = 64  # sets of a block

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Array = npt.NDArray[Any]


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


def coefficients(index_NK: Ints) -> Floats:
    """Return the overlap coefficient of every two sets, [N, N] (SyncKV, Eq. 1); 0 for an empty set."""
    size_N = np.maximum(1, size(index_NK)).astype(np.float32)
    return np.asarray(intersections(index_NK) / np.minimum(size_N[:, None], size_N))


def intersections(index_NK: Ints) -> Floats:
    """Count the positions that every two sets share: [N, N] float32, exact below 2 ** 24.

    Multiplies memberships block by block over the positions of both blocks: distant supports share few.
    """
    end, count = 1 + int(index_NK.max(initial=0)), len(index_NK)
    blocks = [_members(index_NK[at : at + BLOCK], end) for at in range(0, count, BLOCK)]
    counts = np.zeros((count, count), np.float32)
    for first, second in combinations_with_replacement(range(len(blocks)), 2):
        shared = np.flatnonzero((blocks[first][0] >= 0) & (blocks[second][0] >= 0))
        above, below = (member[row[shared]].astype(np.float32) for row, member in (blocks[first], blocks[second]))
        rows, columns = (slice(at * BLOCK, (at + 1) * BLOCK) for at in (first, second))
        counts[rows, columns] = above.T @ below
        counts[columns, rows] = counts[rows, columns].T
    return counts


def _members(index_NK: Ints, end: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    # each position's row in the second array, -1 if no set has it; and which sets have it
    number, column = np.nonzero(index_NK >= 0)
    position, held = index_NK[number, column], np.zeros(end, bool)
    held[position] = True
    row, member = np.where(held, np.cumsum(held) - 1, -1), np.zeros((held.sum(), len(index_NK)), bool)
    member[row[position], number] = True
    return row, member


def size(index: Ints) -> Ints:
    """Count the positions of each set: [...] of [..., K]."""
    return np.asarray((index >= 0).sum(-1))


def _share(part: Ints, whole: Ints) -> Floats:
    nothing = np.full(part.shape, np.nan, np.float32)
    return np.divide(part, whole, out=nothing, where=whole > 0)


def padded(lists: pa.ListArray | pa.ChunkedArray, empty: float = -1, width: int | None = None) -> npt.NDArray[Any]:
    """Pad lists to rows, [N, width], by default as wide as the longest list; nulls are empty."""
    length = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
    values = np.asarray(pc.list_flatten(lists))
    wide = int(length.max(initial=1)) if width is None else width
    rows = np.full((len(length), wide), empty, values.dtype)
    rows[np.arange(wide) < length[:, None]] = values
    return rows


class SelectedSets:
    """The last selection of each KV head of one request and layer; heads may select at different steps."""

    def __init__(self, heads: int) -> None:
        self._known_H = np.zeros(heads, bool)
        self._index_HK = np.full((heads, 0), -1, np.int32)

    def replace(self, heads: Array, index_NK: Array) -> dict[str, Array]:
        """Store the selections of N heads, ascending, and compare each with the head's selection before.

        `index_NK` has their positions, ascending, padded with -1. Returns columns of the table `selections`,
        [N] each: a head's first selection has NaN overlaps, and all its positions are new.
        """
        change = Overlap.of(self._index_HK[heads], index_NK)
        first = ~self._known_H[heads]
        wider = index_NK.shape[1] - self._index_HK.shape[1]
        if wider > 0:
            self._index_HK = np.pad(self._index_HK, ((0, 0), (0, wider)), constant_values=-1)
        self._index_HK[heads] = -1
        self._index_HK[heads, : index_NK.shape[1]] = index_NK
        self._known_H[heads] = True
        return {
            "selected": change.second,
            "overlap_previous": np.where(first, np.nan, change.coefficient),
            "jaccard_previous": np.where(first, np.nan, change.jaccard),
            "added": change.second - change.both,
            "removed": change.first - change.both,
        }
