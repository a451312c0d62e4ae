"""How often a drafted token is kept: by its place in the sentence, and its depth in the draft.

Paper gap: no paper says how acceptance depends on sentences. Places and depths have bins 0, 1, 2, 3-4, 5-8,
...; a bin is split by whether the sentence began within the draft, because the selection is then of the
sentence before. A bin with few tests leans on its place, and a place with few on all tests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from sfi_traces.tune.lossless.texts import Ints, Text

Floats = npt.NDArray[np.float64]
WIDTH = 32  # bins of a place, and of a depth: more than a place has bits
LEAN = 2.0  # tests that a bin takes over from the coarser one
KNOWN = 3  # tests from which on a bin is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Shares kept, for one trigger set.

    Attributes:
        rate_X: Share kept, by bin.
        tested_X: Tests, by bin.
    """

    rate_X: Floats
    tested_X: Ints

    @classmethod
    def of(cls, texts: Sequence[Text], token_ids: Iterable[int]) -> Self:
        """Count what texts kept, at least one test, with sentences that end at some tokens."""
        ids = [*token_ids]
        place, depth, kept = [], [], []
        for text in texts:
            place_T = text.places(ids)
            for one in text.tested:
                place.append(int(place_T[one.step]))
                depth.append(one.depth)
                kept.append(one.kept)
        bin_K = bins(np.array(place), np.array(depth))
        kept_K = np.array(kept, np.float64)
        size = 2 * WIDTH * WIDTH
        tested_X = np.bincount(bin_K, minlength=size)
        kept_X = np.bincount(bin_K, weights=kept_K, minlength=size)
        # [began within, place, depth]: from all tests to a place's, to the bin's
        tested, counted = (each.reshape(2, WIDTH, WIDTH) for each in (tested_X, kept_X))
        overall = (kept_K.sum() + 0.5) / (len(kept_K) + 1)
        coarse = (counted.sum(2) + LEAN * overall) / (tested.sum(2) + LEAN)
        rate = (counted + LEAN * coarse[:, :, None]) / (tested + LEAN)
        return cls(rate_X=rate.ravel(), tested_X=tested_X)

    def rates(self, place_T: Ints, most: int) -> tuple[Floats, Floats]:
        """Look up every draft that may begin in a text.

        Args:
            place_T: Place in the sentence, by step.
            most: The most drafted tokens.

        Returns:
            Share kept, and whether its bin is known, of the token at step s + k drafted at depth k after step
            s, [T, most]; beyond the text's end that of its last token.
        """
        step_TM = np.arange(len(place_T))[:, None] + np.arange(1, most + 1)
        place_TM = place_T[np.minimum(step_TM, len(place_T) - 1)]
        bin_TM = bins(place_TM, np.arange(1, most + 1)[None, :])
        return self.rate_X[bin_TM], (self.tested_X[bin_TM] >= KNOWN).astype(np.float64)


def bins(place: Ints, depth: Ints) -> Ints:
    """Number the bins of places, from 0, and depths, from 1."""
    within = (place < depth).astype(np.int64)
    return (within * WIDTH + _bin(place)) * WIDTH + _bin(depth)


def _bin(value: Ints) -> Ints:
    # 0, 1, 2, 3-4, 5-8: the bits of one less, and one
    return np.where(value > 0, np.frexp(np.maximum(value, 1) - 1)[1] + 1, 0).astype(np.int64)
