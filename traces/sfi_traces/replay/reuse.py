"""How much of each step's own selection a reused, older selection still has.

Recorded selections are reused as they are, without memory, budget or bytes. So any trace with a support of
every step will do, also an imported one (docs/import.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from sfi_traces.model.supports import Floats, Ints, Supports
from sfi_traces.replay.outcome import LOW
from sfi_traces.replay.replay import held_before

EVERY = (1, 2, 4, 8, 16)  # intervals that an imported trace is replayed with


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step missed most of its own selection."""

    recall: float
    request: int
    step: int
    layer: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReuse:
    """The reused steps of one layer; see `Reuse`."""

    layer: int
    recall: float | None
    recall_with_new: float | None
    retained_mass: float | None
    own_mass: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """A schedule summed up over requests; means are over the steps that reuse, their layers and heads.

    Attributes:
        runs: Steps that select anew, step 0 of each request included.
        saved: Share of reusing steps from step 1 on.
        recall: Share of a step's own selection that is in the reused one; None where no step reuses.
        recall_p5: Its 5th percentile.
        recall_with_new: Recall if all tokens since the last selection are read too.
        retained_mass: Recorded mass of the reused selection and these tokens; None without masses.
        own_mass: Recorded mass of the step's own selection.
        worst: Where recall is least.
        worst_layer: The layer with the least mean recall.
    """

    runs: int
    reused_steps: int
    saved: float
    recall: float | None
    recall_p5: float | None
    recall_with_new: float | None
    retained_mass: float | None
    own_mass: float | None
    worst: Place | None
    worst_layer: int | None
    layers: list[LayerReuse]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReusedSteps:
    """One request's steps; NaN where a step selects anew or has selected nothing.

    Attributes:
        slow: Number of steps that select anew.
        recall_NU: Share of the step's own selection that is in the reused one.
        with_new_NU: Recall with the tokens since the last selection.
        kept_NU: Mass of the reused selection and these tokens; NaN without masses.
        own_NU: Mass of the step's own selection; NaN without masses.
    """

    request: int
    layer_U: Ints
    head_U: Ints
    slow: int
    recall_NU: Floats
    with_new_NU: Floats
    kept_NU: Floats
    own_NU: Floats

    @classmethod
    def of(cls, supports: Supports, reasons: Sequence[str]) -> Self:
        """Compare each step with the last step before it that has a reason to select."""
        N, U, _ = supports.position_NUK.shape
        recall_NU, with_new_NU, kept_NU, own_NU = (
            np.full((N, U), np.nan, np.float32) for _ in range(4)
        )
        edges = [step for step, reason in enumerate(reasons) if reason]
        for slow, end in pairwise([*edges, N]):
            later = slice(slow + 1, end)
            position_NUK, mass_NUK = supports.position_NUK[later], supports.mass_NUK[later]
            held_NUK = held_before(supports, slow, position_NUK)
            either_NUK = held_NUK | (position_NUK >= supports.length_N[slow])
            size_NU = (position_NUK >= 0).sum(-1).astype(np.float32)
            size_NU[size_NU == 0] = np.nan
            recall_NU[later] = held_NUK.sum(-1) / size_NU
            with_new_NU[later] = either_NUK.sum(-1) / size_NU
            if supports.masses:
                kept_NU[later] = (mass_NUK * either_NUK).sum(-1)
                own_NU[later] = mass_NUK.sum(-1)
        return cls(
            request=supports.request, layer_U=supports.layer_U, head_U=supports.head_U, slow=len(edges),
            recall_NU=recall_NU, with_new_NU=with_new_NU, kept_NU=kept_NU, own_NU=own_NU,
        )  # fmt: skip

    def worst(self) -> Place | None:
        """Find where recall is least; None where no step reuses."""
        if np.isnan(self.recall_NU).all():
            return None
        step, unit = np.unravel_index(int(np.nanargmin(self.recall_NU)), self.recall_NU.shape)
        return Place(
            recall=float(self.recall_NU[step, unit]),
            request=self.request,
            step=int(step),
            layer=int(self.layer_U[unit]),
            head=int(self.head_U[unit]),
        )


def reuse(recorded: Sequence[Supports], schedules: Sequence[Sequence[str]]) -> Reuse:
    """Replay a schedule over several requests.

    `schedules` has for each request why its steps select anew, empty where they reuse; see `schedule`.
    """
    found = [ReusedSteps.of(*pair) for pair in zip(recorded, schedules, strict=True)]
    runs, steps = sum(one.slow for one in found), sum(len(one.recall_NU) for one in found)
    layers = [_layer(found, layer) for layer in np.unique(recorded[0].layer_U).tolist()]
    known = [one for one in layers if one.recall is not None]
    recall = _pooled(found, "recall_NU")
    worst = [place for one in found if (place := one.worst()) is not None]
    return Reuse(
        runs=runs,
        reused_steps=steps - runs,
        saved=(steps - runs) / max(1, steps - len(found)),
        recall=_mean(recall),
        recall_p5=float(np.percentile(recall, LOW)) if len(recall) else None,
        recall_with_new=_mean(_pooled(found, "with_new_NU")),
        retained_mass=_mean(_pooled(found, "kept_NU")),
        own_mass=_mean(_pooled(found, "own_NU")),
        worst=min(worst, key=lambda place: place.recall, default=None),
        worst_layer=min(known, key=lambda one: one.recall or 0.0).layer if known else None,
        layers=layers,
    )


def chance(recorded: Sequence[Supports]) -> float:
    """Return a random selection's recall: the mean share of the context that a selection has."""
    shares = [
        ((one.position_NUK >= 0).sum(-1) / one.length_N[:, None])[1:].ravel() for one in recorded
    ]
    return _mean(np.concatenate(shares)) or 0.0


def _layer(found: Sequence[ReusedSteps], layer: int) -> LayerReuse:
    names = {
        "recall": "recall_NU", "recall_with_new": "with_new_NU", "retained_mass": "kept_NU",
        "own_mass": "own_NU",
    }  # fmt: skip
    means = {word: _mean(_pooled(found, name, layer)) for word, name in names.items()}
    return LayerReuse(layer=layer, **means)


def _pooled(found: Sequence[ReusedSteps], name: str, layer: int | None = None) -> Floats:
    pieces = []
    for one in found:
        values_NU = getattr(one, name)
        kept = slice(None) if layer is None else one.layer_U == layer
        pieces.append(values_NU[:, kept].ravel())
    pooled = np.concatenate(pieces)
    known: Floats = pooled[~np.isnan(pooled)]
    return known


def _mean(values: Floats) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None
