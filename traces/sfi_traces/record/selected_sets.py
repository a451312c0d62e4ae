"""Each KV head's last selection, to count what the next one changes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from sfi_traces.overlap import Overlap

Array = npt.NDArray[Any]


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
        self._keep(heads, index_NK)
        return {
            "selected": change.second,
            "overlap_previous": np.where(first, np.nan, change.coefficient),
            "jaccard_previous": np.where(first, np.nan, change.jaccard),
            "added": change.second - change.both,
            "removed": change.first - change.both,
        }

    def _keep(self, heads: Array, index_NK: Array) -> None:
        wider = index_NK.shape[1] - self._index_HK.shape[1]
        if wider > 0:
            self._index_HK = np.pad(self._index_HK, ((0, 0), (0, wider)), constant_values=-1)
        self._index_HK[heads] = -1
        self._index_HK[heads, : index_NK.shape[1]] = index_NK
        self._known_H[heads] = True
