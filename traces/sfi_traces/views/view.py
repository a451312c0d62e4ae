"""What a figure shows: one request of a trace, and optionally one layer or KV head."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.read.reader import Trace
from sfi_traces.views.stability import LagLine, Place, ViewSupports, overlap_by_lag, rows_of


@dataclass(frozen=True, slots=True)
class Steps:
    """A request's steps: one value of each kind for each step, in order.

    Attributes:
        text: The generated token; "" in a redacted trace.
        reason: Why the step was slow; "" for a fast step.
        sentence: Index of the step's sentence.
        attended: Tokens read per KV head.
        context: Tokens that full attention reads.
        elapsed_us: Wall time.
        audited: Whether the step was audited, which takes time.
        batch_step: The batch's step of which it was part.
        drafted: Whether a lossless run drafted the token, and kept it.
    """

    step: np.ndarray
    text: list[str]
    slow: np.ndarray
    reason: list[str]
    sentence: np.ndarray
    attended: np.ndarray
    context: np.ndarray
    elapsed_us: np.ndarray
    audited: np.ndarray
    batch_step: np.ndarray
    drafted: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table) -> "Steps":
        """Take the steps from the table `steps`."""
        rows = rows.sort_by("step")
        return cls(
            step=rows["step"].to_numpy(),
            text=[text or "" for text in rows["token_text"].to_pylist()],
            slow=rows["slow"].to_numpy(),
            reason=rows["reason"].to_pylist(),
            sentence=rows["sentence"].to_numpy(),
            attended=rows["attended_tokens"].to_numpy(),
            context=rows["context_tokens"].to_numpy(),
            elapsed_us=rows["elapsed_us"].to_numpy(),
            audited=rows["audited"].to_numpy(),
            batch_step=pc.coalesce(rows["batch_step"], rows["step"]).to_numpy(),
            drafted=pc.fill_null(rows["drafted"], False).to_numpy(),
        )

    def rows(self, step: np.ndarray) -> np.ndarray:
        """Find the rows of the steps in `step`."""
        return np.searchsorted(self.step, step)


class View:
    """One request of a trace, and optionally one layer or KV head; read once for all figures.

    Attributes:
        requests: All requests that have a step.
        layer: The layer; None for all.
        head: The KV head; None for all.
        top: Positions of a support, K; None for all that were recorded.
    """

    def __init__(
        self,
        trace: Trace,
        request: int | None = None,
        layer: int | None = None,
        head: int | None = None,
        top: int | None = None,
    ) -> None:
        """Choose what to show; by default the first request.

        Raises:
            ConfigError: The trace has no such request or no supports so large, or its model no such layer or
                KV head.
            TraceError: No step was recorded.
        """
        table = trace.table("steps")
        if not len(table):
            raise TraceError(f"trace {trace.path} has no finished step")
        self.trace, self.layer, self.head, self.top = trace, layer, head, top
        self.requests: list[int] = sorted(pc.unique(table["request"]).to_pylist())
        layers = [place for place in trace.manifest["model"]["layers"] if place["window"] is None]
        _check("request", request, self.requests)
        _check("layer", layer, [place["layer"] for place in layers])
        heads = [place["heads"] for place in layers if layer in (None, place["layer"])]
        _check("head", head, list(range(max(heads, default=0))))
        audit = trace.manifest["audit"]
        if top is not None and audit is not None and not 1 <= top <= audit["top"]:
            raise ConfigError(
                f"top must be in 1 to {audit['top']}, which the audit recorded, got {top}"
            )
        if top is not None and audit is not None and top < audit["top"]:
            trace.require_masses()
        self.request: int = self.requests[0] if request is None else request
        self.steps = Steps.of(table.filter(pc.field("request") == self.request))

    @property
    def wanted(self) -> pc.Expression:
        """A filter for the rows of the request, layer and head."""
        return rows_of(self.request, self.layer, self.head)

    @property
    def of_request(self) -> pc.Expression:
        """A filter for the rows of the request, of all layers and heads."""
        return rows_of(self.request)

    @property
    def places(self) -> list[Place]:
        """The chosen layers and KV heads of full-attention layers."""
        return [
            (one["layer"], head)
            for one in self.trace.manifest["model"]["layers"]
            if one["window"] is None and self.layer in (None, one["layer"])
            for head in range(one["heads"])
            if self.head in (None, head)
        ]

    @cached_property
    def lags(self) -> tuple[LagLine, LagLine]:
        """Overlap by lag, within a sentence and across a boundary; raises `TraceError` for one step."""
        step = self.supports.step
        if len(step) == 1:
            raise TraceError(
                f"trace {self.trace.path} has one audited step, too few for an overlap"
            )
        return overlap_by_lag(self.supports, self.steps.sentence[self.steps.rows(step)])

    @property
    def k(self) -> int:
        """Positions of a support."""
        return self.top or int(self.trace.manifest["audit"]["top"])

    @cached_property
    def audited_layers(self) -> int:
        """Number of the chosen layers that have supports."""
        return len(pc.unique(self.trace.rows("supports", ["layer"], self.wanted)["layer"]))

    @cached_property
    def supports(self) -> ViewSupports:
        """Supports of the steps; raises `TraceError` where there are none."""
        # a killed run may have written the supports of a step before the step
        last = int(self.steps.step[-1])
        found = ViewSupports.read(self.trace, self.request, last, self.layer, self.head)
        return found if self.top is None else found.strongest(self.top)


def _check(name: str, value: int | None, known: list[int]) -> None:
    if value is None or value in known:
        return
    if len(known) > 1 and known == list(range(known[0], known[-1] + 1)):
        raise ConfigError(f"{name} must be in {known[0]} to {known[-1]}, got {value}")
    raise ConfigError(f"{name} must be one of {known}, got {value}")
