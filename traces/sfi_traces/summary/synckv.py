"""Attention drift and intralayer similarity of supports, as SyncKV observed them (Fig. 2a and 2c)."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place
from sfi_traces.overlap import Overlap, coefficients
from sfi_traces.summary.lags import SPREAD

MOST_STEPS = 64  # of a request, evenly chosen


@dataclass(frozen=True, slots=True)
class Drift:
    """Overlap of the supports of audited steps from 1 on with step 0's, by place."""

    step: np.ndarray
    overlap: dict[Place, np.ndarray]

    @property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return sorted({layer for layer, _ in self.overlap})

    def of(self, layer: int) -> "Drift":
        """Keep one layer."""
        kept = {place: values for place, values in self.overlap.items() if place[0] == layer}
        return Drift(self.step, kept)

    @property
    def mean(self) -> np.ndarray:
        """The mean over layers and KV heads, [S]."""
        return np.asarray(np.mean([*self.overlap.values()], axis=0))

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """The 10 % and 90 % quantiles over layers and KV heads, [S] each."""
        low, high = np.quantile([*self.overlap.values()], SPREAD, axis=0)
        return low, high

    @property
    def points(self) -> int:
        """Overlaps behind a step's mean: layers x KV heads."""
        return len(self.overlap)


def drift(supports: Supports) -> Drift:
    """Compare each step's supports with step 0's by the overlap coefficient (SyncKV, Eq. 1).

    Paper gap: SyncKV compares with the prefill without saying which of its queries counts; step 0 is the
    prompt's last position, whose support is the first that decoding could have kept.

    Raises `TraceError` if step 0, or every later step, has no support.
    """
    if not supports.steps or supports.step_N[0] != 0:
        raise TraceError("drift needs the support of step 0, the prompt's, got none; record the trace with --audit 1")
    if supports.steps == 1:
        raise TraceError("drift needs an audited step after step 0, got none; record the trace with --audit 1")
    first_1UK, later_NUK = supports.position_NUK[:1], supports.position_NUK[1:]
    found = {
        place: Overlap.of(np.repeat(first_1UK[:, unit], len(later_NUK), 0), later_NUK[:, unit])
        for unit, place in enumerate(supports.places)
    }
    return Drift(supports.step_N[1:], {place: one.coefficient for place, one in found.items()})


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
            total += coefficients(index_PK)
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
        total_LL, pairs_LL = (of_LP @ each @ of_LP.T for each in (self.total * self._pairs, self._pairs))
        nothing = np.full(total_LL.shape, np.nan)
        counted_LL = pairs_LL * self.steps
        return np.asarray(np.divide(total_LL, counted_LL, out=nothing, where=counted_LL > 0))

    @property
    def within(self) -> float:
        """Mean overlap of two KV heads of one layer; NaN where every layer has one head."""
        return self._mean(same=True)

    @property
    def between(self) -> float:
        """Mean overlap of two KV heads of different layers."""
        return self._mean(same=False)

    @property
    def _pairs(self) -> np.ndarray:
        # without a head and itself
        return 1 - np.eye(len(self.places))

    def _mean(self, *, same: bool) -> float:
        layer_P = np.array([layer for layer, _ in self.places])
        wanted_PP = self._pairs * ((layer_P[:, None] == layer_P) == same)
        pairs = float(wanted_PP.sum()) * self.steps
        return float((self.total * wanted_PP).sum() / pairs) if pairs else float("nan")
