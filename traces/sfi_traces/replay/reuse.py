"""How much of each step's own selection a reused, older selection still has.

Recorded selections are reused as they are, without memory, budget or bytes. So any trace with a support of
every step will do, also an imported one (docs/import.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Self

import numpy as np

from sfi_traces.model.steps import Floats, Ints
from sfi_traces.model.supports import Supports
from sfi_traces.replay.outcome import LOW, known, least, mean
from sfi_traces.replay.replay import held_before

MEANS = {  # by name in a document
    "recall": "recall_NU", "recall_with_new": "with_new_NU", "retained_mass": "kept_NU", "own_mass": "own_NU",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """A schedule summed up over requests; means are over the steps that reuse, their layers and heads.

    Attributes:
        runs: Steps that select anew, step 0 of each request included.
        saved: Share of reusing steps from step 1 on.
        recall: Share of a step's own selection that is in the reused one; None where no step reuses.
        recall_with_new: Recall if all tokens since the last selection are read too.
        retained_mass: Recorded mass of the reused selection and these tokens; None without masses.
        own_mass: Recorded mass of the step's own selection.
        worst: Where recall is least; `worst_layer` has the least mean.
        layers: The means of each layer.
    """

    runs: int
    reused_steps: int
    saved: float
    recall: float | None
    recall_p5: float | None
    recall_with_new: float | None
    retained_mass: float | None
    own_mass: float | None
    worst: dict[str, Any] | None
    worst_layer: int | None
    layers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReusedSteps:
    """One request's steps; NaN where a step selects anew or has selected nothing.

    Attributes:
        slow: Number of steps that select anew.
        recall_NU: Share of the step's own selection that is in the reused one.
        with_new_NU: Recall with the tokens since the last selection.
        kept_NU: Mass of the reused selection and these tokens; NaN without masses, as is `own_NU`.
        own_NU: Mass of the step's own selection.
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
        recall_NU, with_new_NU, kept_NU, own_NU = (np.full((N, U), np.nan, np.float32) for _ in range(4))
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


def reuse(recorded: Sequence[Supports], schedules: Sequence[Sequence[str]]) -> Reuse:
    """Replay over several requests why their steps select anew, "" where they reuse; see `schedule`."""
    requests = [ReusedSteps.of(*pair) for pair in zip(recorded, schedules, strict=True)]
    runs, steps = sum(request.slow for request in requests), sum(len(request.recall_NU) for request in requests)
    layers: list[dict[str, Any]] = [{"layer": layer, **_means(requests, layer)} for layer in recorded[0].layers]
    reusing = [row for row in layers if row["recall"] is not None]
    recall = known(request.recall_NU for request in requests)
    return Reuse(
        runs=runs,
        reused_steps=steps - runs,
        saved=(steps - runs) / max(1, steps - len(requests)),
        recall_p5=float(np.percentile(recall, LOW)) if len(recall) else None,
        **_means(requests),
        worst=least("recall", [(request, request.recall_NU) for request in requests]),
        worst_layer=min(reusing, key=itemgetter("recall"))["layer"] if reusing else None,
        layers=layers,
    )


def chance(recorded: Sequence[Supports]) -> float:
    """Return a random selection's recall: the mean share of the context that a selection has."""
    shares = [((request.position_NUK >= 0).sum(-1) / request.length_N[:, None])[1:].ravel() for request in recorded]
    return mean(np.concatenate(shares)) or 0.0


def _means(requests: Sequence[ReusedSteps], layer: int | None = None) -> dict[str, float | None]:
    # of all layers, or of one
    means = {}
    for word, name in MEANS.items():
        values = [
            getattr(request, name)[:, slice(None) if layer is None else request.layer_U == layer]
            for request in requests
        ]
        means[word] = mean(known(values))
    return means
