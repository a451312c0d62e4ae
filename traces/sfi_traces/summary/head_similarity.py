"""Intralayer similarity (SyncKV, Fig. 2c): how alike the supports of a step's KV heads are."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place
from sfi_traces.overlap import intersections, size

MOST_STEPS = 64  # of a request, evenly chosen


@dataclass(frozen=True, slots=True)
class HeadSimilarity:
    """Overlap of every two of P layers and KV heads at the same step, summed in `total`, [P, P]."""

    places: list[Place]
    total: np.ndarray
    steps: int

    @classmethod
    def of(cls, supports: Supports) -> Self:
        """Compare all heads at each step (SyncKV, Eq. 1); raises `TraceError` for a single layer."""
        places = supports.places
        if places[0][0] == places[-1][0]:
            raise TraceError(
                f"head similarity needs two audited layers or more, got layer {places[0][0]} alone; leave "
                "--layer out, or record the trace with --audit 1 of all layers"
            )
        total = np.zeros((len(places), len(places)))
        for index_PK in supports.position_NUK:
            size_P = np.maximum(1, size(index_PK)).astype(np.float32)
            total += intersections(index_PK) / np.minimum(size_P[:, None], size_P)
        return cls(places, total, supports.steps)

    def __add__(self, other: "HeadSimilarity") -> "HeadSimilarity":
        """Join the steps of two requests."""
        return HeadSimilarity(self.places, self.total + other.total, self.steps + other.steps)

    @property
    def layers(self) -> list[int]:
        """The L layers, ascending."""
        return sorted({layer for layer, _ in self.places})

    @property
    def matrix(self) -> np.ndarray:
        """Mean over pairs of a head of the row's layer and one of the column's, [L, L].

        The diagonal excludes a head's overlap with itself; it is NaN where a layer has one head.

        Paper gap: SyncKV averages "from each head in a source layer to a target layer"; each head of the
        target layer counts alike here, and not the most similar one alone.
        """
        of_LP = np.array([[layer == own for own, _ in self.places] for layer in self.layers], float)
        total_LL, pairs_LL = (of_LP @ each @ of_LP.T for each in (self._apart, self._pairs))
        nothing = np.full(total_LL.shape, np.nan)
        return np.asarray(np.divide(total_LL, pairs_LL * self.steps, out=nothing, where=pairs_LL > 0))

    @property
    def within(self) -> float:
        """Mean overlap of two KV heads of one layer; NaN where every layer has one head."""
        return self._mean(self._same)

    @property
    def between(self) -> float:
        """Mean overlap of two KV heads of different layers."""
        return self._mean(~self._same)

    @property
    def _same(self) -> np.ndarray:
        layer_P = np.array([layer for layer, _ in self.places])
        same: np.ndarray = layer_P[:, None] == layer_P
        return same

    @property
    def _pairs(self) -> np.ndarray:
        return 1 - np.eye(len(self.places))

    @property
    def _apart(self) -> np.ndarray:
        return np.asarray(self.total * self._pairs)

    def _mean(self, wanted_PP: np.ndarray) -> float:
        pairs = float(self._pairs[wanted_PP].sum()) * self.steps
        return float(self._apart[wanted_PP].sum() / pairs) if pairs else float("nan")
