"""What a run measured, in the same numbers as a replay's, and the two side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.byte_model import ByteModel
from sfi_traces.reader import Trace
from sfi_traces.replay.outcome import Outcome, StepMetrics
from sfi_traces.replay.replay import replay_request
from sfi_traces.replay.setting import Setting
from sfi_traces.replay.support import Supports, last_slow, recent_starts

COLUMNS = ["request", "step", "layer", "head", "retained_mass", "overlap_last_refresh"]
POLICY = "sfi"


def measured(trace: Trace, like: Sequence[Supports], *, batch: int = 1) -> list[StepMetrics]:
    """Read what a run really kept, for the same requests, steps, layers and heads.

    Args:
        trace: A run with `--policy sfi` and an audit; NaN where the audit skipped a step.
        like: Whose requests, steps, layers and heads.
        batch: Requests that share the weights' bytes.

    Raises:
        TraceError: Another policy ran, or without an audit.
    """
    trace.require_audit()
    if trace.manifest["policy"] != POLICY:
        raise TraceError(
            f"trace {trace.path} must be of --policy {POLICY}, got {trace.manifest['policy']}"
        )
    steps = trace.table("steps", ["request", "step", "reason", "context_tokens", "attended_tokens"])
    supports = trace.table("supports", COLUMNS)
    setting = Setting.recorded(trace)
    found = []
    for one in like:
        rows = [row for row in steps.to_pylist() if row["request"] == one.request]
        rows.sort(key=lambda row: row["step"])
        found.append(_measured(one, setting, rows[: one.steps], supports, batch))
    return found


def _measured(
    like: Supports, setting: Setting, rows: list[dict[str, Any]], supports: Any, batch: int
) -> StepMetrics:
    config = setting.config
    reasons = [row["reason"] for row in rows]
    slow_N = np.array([bool(reason) for reason in reasons])
    length_N = np.array([row["context_tokens"] for row in rows])
    mean_N = np.array([row["attended_tokens"] for row in rows])
    sink = min(config.sink, like.prompt_tokens)
    start_N = recent_starts(
        slow_N, length_N, sink=sink, recent=config.recent, sliding=config.recent_mode == "sliding"
    )
    packed_N = sink + np.minimum(config.budget, start_N[last_slow(slow_N)] - sink)
    model = ByteModel.of(like.model, dense_layers=config.dense_layers, batch=batch)
    kept_NU = _column(supports, like, "retained_mass", len(rows))
    return StepMetrics(
        request=like.request,
        layer_U=like.layer_U,
        head_U=like.head_U,
        reasons=reasons,
        length_N=length_N,
        attended_N=mean_N,
        lower_NU=kept_NU,
        upper_NU=kept_NU,
        overlap_NU=_column(supports, like, "overlap_last_refresh", len(rows)),
        bytes_N=np.where(
            slow_N,
            model.slow(length_N, packed_N),
            model.fast(length_N, model.sparse_attended(length_N, mean_N)),
        ),
        dense_bytes_N=np.asarray(model.dense(length_N)),
    )
