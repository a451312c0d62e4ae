"""What a figure shows: one request of a trace, and optionally one layer or KV head."""

from functools import cached_property

import pyarrow.compute as pc

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.request import Request, check_known, step_table
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place, Trace, of_request
from sfi_traces.summary.lags import LagLine, overlap_by_lag
from sfi_traces.summary.scope import Scope


class View:
    """One request of a trace, and optionally one layer or KV head; read once for all figures.

    `requests` are all that have a step; `layer` and `head` are None for all; `top` is the number of positions
    of a support, None for all that were recorded.
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

        Raises `ConfigError` for a request, layer, KV head or size of supports that the trace lacks, `TraceError`
        without a step.
        """
        table = step_table(trace)
        self.trace, self.layer, self.head, self.top = trace, layer, head, top
        self.requests: list[int] = sorted(pc.unique(table["request"]).to_pylist())
        layers = [place for place in trace.manifest["model"]["layers"] if place["window"] is None]
        check_known("request", [request], self.requests)
        check_known("layer", [layer], [place["layer"] for place in layers])
        heads = [place["heads"] for place in layers if layer in (None, place["layer"])]
        check_known("head", [head], range(max(heads, default=0)))
        audit = trace.manifest["audit"]
        if top is not None and audit is not None and not 1 <= top <= audit["top"]:
            raise ConfigError(f"top must be in 1 to {audit['top']}, which the audit recorded, got {top}")
        if top is not None and audit is not None and top < audit["top"]:
            trace.require_masses()
        self.request: int = self.requests[0] if request is None else request
        self.recorded = Request(trace, self.request, of_request(table, self.request))
        self.steps = self.recorded.steps

    @property
    def wanted(self) -> pc.Expression:
        """A filter for the rows of the recorded steps, of the layer and head."""
        return self.recorded.wanted(self.layer, self.head)

    @property
    def places(self) -> list[Place]:
        """The chosen layers and KV heads of full-attention layers."""
        return self.recorded.places(self.layer, self.head)

    @cached_property
    def lags(self) -> tuple[LagLine, LagLine]:
        """Overlap by lag, within a sentence and across a boundary; raises `TraceError` for one step."""
        step = self.supports.step_N
        if len(step) == 1:
            raise TraceError(f"trace {self.trace.path} has one audited step, too few for an overlap")
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
    def scope(self) -> Scope:
        """The request, and layer, for SQL."""
        return Scope.of(self.trace, self.request, self.layer)

    @cached_property
    def supports(self) -> Supports:
        """Supports of the steps; raises `TraceError` where there are none."""
        found = Supports.read(self.recorded, self.layer, self.head)
        return found if self.top is None else found.strongest(self.top)
