"""Compares a replay's prediction with a run of the same setting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa

from sfi_core.errors import TraceError
from sfi_traces.model.steps import Floats
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Row, Trace, rows_of
from sfi_traces.replay.outcome import Outcome, StepMetrics
from sfi_traces.replay.replay import metrics, replay_request
from sfi_traces.replay.setting import SCAN, Setting

POLICIES = ("sfi", SCAN)
STEPS = ["request", "step", "token_id", "reason", "attended_tokens"]
SUPPORTS = ["request", "step", "layer", "head", "retained_mass", "overlap_last_refresh"]


Steps = tuple[StepMetrics, StepMetrics, Row]  # of a request: predicted, measured, how many were compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Prediction and measurement over the same steps, layers and heads.

    Attributes:
        same_schedule: Whether the same steps are slow for the same reasons.
        mean_difference: Mean over fast steps, layers and heads of the predicted retained mass (lower bound)
            less the measured one; None without fast steps. `mean_distance` is that of its absolute value.
        requests: By request the compared `steps`, step 0 included: those with the same tokens before them in both
            runs; and the `recorded_steps` and `measured_steps`.
    """

    predicted: Outcome
    measured: Outcome
    same_schedule: bool
    mean_difference: float | None
    mean_distance: float | None
    requests: list[Row]


def compare(recorded: Sequence[Supports], trace: Trace, real: Trace) -> Comparison:
    """Replay the setting of `real`, a run of policy sfi or codescan with an audit, over `trace`, and compare.

    Only steps up to the first different token are compared; then the texts differ. Where `audit.top` differs,
    overlaps are not.

    Raises `TraceError` for another model, prompt or policy, or without an audit.
    """
    return pooled(compare_steps(recorded, trace, real))


def compare_steps(recorded: Sequence[Supports], trace: Trace, real: Trace) -> list[Steps]:
    """Compare as `compare`; return the steps of each request."""
    _check_pair(recorded, trace, real)
    setting = Setting.recorded(real)
    steps = real.table("steps", STEPS)
    audited = real.table("supports", SUPPORTS)
    compared = []
    for supports in recorded:
        measured = steps.filter(rows_of(supports.request)).sort_by("step")
        # a step is compared if its query, x_{t-1}, and all tokens before it are the same in both
        pairs = zip(supports.tokens, measured["token_id"].to_pylist(), strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] or pair[1] is None, pairs))
        common = min(equal + 1, supports.steps, measured.num_rows)
        sparse = [place for place in supports.places if place[0] not in setting.config.dense_layers]
        like = supports.at(slice(common)).of_places(sparse)
        prediction, measurement = replay_request(like, setting), _measured(like, setting, measured, audited)
        known: dict[str, Any] = {
            name: np.where(np.isnan(measurement.lower_NU), np.nan, getattr(prediction, name))
            for name in ("lower_NU", "upper_NU", "overlap_NU")
        }
        prediction = replace(prediction, **known)
        if real.manifest["audit"]["top"] != supports.top:
            prediction, measurement = prediction.without_overlap(), measurement.without_overlap()
        counts = {"steps": common, "recorded_steps": supports.steps, "measured_steps": measured.num_rows}
        compared.append((prediction, measurement, {"request": supports.request, **counts}))
    return compared


def pooled(compared: Sequence[Steps]) -> Comparison:
    """Sum up the requests of several traces, every step with the same weight."""
    predictions, measurements, requests = zip(*compared, strict=True)
    pairs = list(zip(predictions, measurements, strict=True))
    differences = np.concatenate(
        [(replayed.lower_NU - other.lower_NU)[~(replayed.slow_N | other.slow_N)].ravel() for replayed, other in pairs]
    )
    known = differences[~np.isnan(differences)]
    return Comparison(
        predicted=Outcome.of(predictions),
        measured=Outcome.of(measurements),
        same_schedule=all(replayed.reasons == other.reasons for replayed, other in pairs),
        mean_difference=float(known.mean()) if len(known) else None,
        mean_distance=float(np.abs(known).mean()) if len(known) else None,
        requests=list(requests),
    )


def _check_pair(recorded: Sequence[Supports], trace: Trace, real: Trace) -> None:
    real.require_audit()
    if real.manifest["policy"] not in POLICIES:
        raise TraceError(f"trace {real.path} must be of --policy sfi or codescan, got {real.manifest['policy']}")
    if real.path == trace.path:
        return
    check_one_model(trace, real)
    prompts = [{prompt["request"]: prompt["sha256"] for prompt in side.manifest["prompts"]} for side in (trace, real)]
    for supports in recorded:
        first, second = (shas.get(supports.request) for shas in prompts)
        if first != second:
            raise TraceError(
                f"traces must be of the same prompts, got different ones for request {supports.request} "
                f"in {trace.path} and {real.path}"
            )
    for side in (trace, real):
        if side.manifest["redacted"]:
            raise TraceError(f"trace {side.path} is redacted; it can be compared with itself only")


def check_one_model(trace: Trace, other: Trace) -> None:
    """Raise `TraceError` for traces of different models; names the first fact that differs."""
    for name, value in trace.manifest["model"].items():
        if other.manifest["model"].get(name) != value:
            raise TraceError(f"traces must be of one model, got another {name} in {other.path} than in {trace.path}")


def _measured(like: Supports, setting: Setting, steps: pa.Table, audited: pa.Table) -> StepMetrics:
    steps, rows = steps.slice(0, like.steps), audited.filter(rows_of(like.request))
    kept_NU, overlap_NU = (_column(rows, like, name) for name in ("retained_mass", "overlap_last_refresh"))
    if setting.scans:
        overlap_NU = np.full_like(overlap_NU, np.nan)  # nothing is reused
    measured = (kept_NU, kept_NU, overlap_NU), steps["attended_tokens"].to_numpy()
    return metrics(like, setting, steps["reason"].to_pylist(), *measured)


def _column(rows: pa.Table, like: Supports, name: str) -> Floats:
    # [N, U], NaN where there is no row
    step, layer, head = (rows[key].to_numpy() for key in ("step", "layer", "head"))
    out_NU = np.full((like.steps, len(like.layer_U)), np.nan, np.float32)
    values = rows[name].to_numpy()
    for unit, pair in enumerate(zip(like.layer_U, like.head_U, strict=True)):
        at = (layer == pair[0]) & (head == pair[1]) & (step < like.steps)
        out_NU[step[at], unit] = values[at]
    return out_NU
