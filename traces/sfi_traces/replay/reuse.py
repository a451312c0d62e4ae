"""How much of each step's own selection a reused, older selection still has.

Recorded selections are reused as they are, without memory, budget or bytes. So any trace with a support of
every step will do, also an imported one (docs/import.md).
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from sfi_traces.model.steps import Floats
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Row
from sfi_traces.replay.outcome import LOW, known, least, mean
from sfi_traces.replay.replay import held_before

MEANS = ("recall", "recall_with_new", "retained_mass", "own_mass")


def reuse(recorded: Sequence[Supports], schedules: Sequence[Sequence[str]]) -> Row:
    """Replay over several requests why their steps select anew, "" where they reuse; see `schedule`.

    Counts `runs`, steps that select anew, step 0 of each request included, and `reused_steps`; `saved` is the share of
    these from step 1 on. `recall` is the share of a step's own selection that is in the reused one (`recall_p5`,
    `worst`), `recall_with_new` that if all tokens since are read too, `retained_mass` the recorded mass of both,
    `own_mass` that of the step's own selection: means over the steps that reuse, their layers and heads, and in
    `layers` of each layer; None where no step reuses, or masses are not known.
    """
    reused = [_reused(request, reasons) for request, reasons in zip(recorded, schedules, strict=True)]

    def means(layer: int | None = None) -> dict[str, float | None]:
        units: list[Any] = [slice(None) if layer is None else request.layer_U == layer for request in recorded]
        pairs = list(zip(reused, units, strict=True))
        return {name: mean(known(values[name][:, unit] for values, unit in pairs)) for name in MEANS}

    runs, steps = sum(map(bool, chain(*schedules))), sum(map(len, schedules))
    recalls = [values["recall"] for values in reused]
    recall = known(recalls)
    return {
        "runs": runs,
        "reused_steps": steps - runs,
        "saved": (steps - runs) / max(1, steps - len(recorded)),
        **means(),
        "recall_p5": float(np.percentile(recall, LOW)) if len(recall) else None,
        "worst": least("recall", zip(recorded, recalls, strict=True)),
        "layers": [{"layer": layer, **means(layer)} for layer in recorded[0].layers],
    }


def chance(recorded: Sequence[Supports]) -> float:
    """Return a random selection's recall: the mean share of the context that a selection has."""
    shares = [((request.position_NUK >= 0).sum(-1) / request.length_N[:, None])[1:].ravel() for request in recorded]
    return mean(np.concatenate(shares)) or 0.0


def _reused(supports: Supports, reasons: Sequence[str]) -> dict[str, Floats]:
    # compares each step with the last one that selects; NaN where a step selects anew or has selected nothing
    N, U, _ = supports.position_NUK.shape
    reused = {name: np.full((N, U), np.nan, np.float32) for name in MEANS}
    for slow, end in pairwise([*(step for step, reason in enumerate(reasons) if reason), N]):
        later = slice(slow + 1, end)
        position_NUK, mass_NUK = supports.position_NUK[later], supports.mass_NUK[later]
        held_NUK = held_before(supports, slow, position_NUK)
        either_NUK = held_NUK | (position_NUK >= supports.length_N[slow])
        size_NU = (position_NUK >= 0).sum(-1).astype(np.float32)
        size_NU[size_NU == 0] = np.nan
        reused["recall"][later] = held_NUK.sum(-1) / size_NU
        reused["recall_with_new"][later] = either_NUK.sum(-1) / size_NU
        if supports.masses:
            reused["retained_mass"][later] = (mass_NUK * either_NUK).sum(-1)
            reused["own_mass"][later] = mass_NUK.sum(-1)
    return reused
