"""Attention drift (SyncKV, Fig. 2a): how much of the prompt's support remains as decoding goes on."""

from dataclasses import dataclass

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place
from sfi_traces.overlap import Overlap
from sfi_traces.summary.lags import SPREAD


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
        mean: np.ndarray = np.mean([*self.overlap.values()], axis=0)
        return mean

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

    Raises:
        TraceError: Step 0, or every later step, has no support.
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
