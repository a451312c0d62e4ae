"""Top-k sets that a trace's audit recorded, by layer and KV head, for `sfi tune heads`.

Paper gap: the audit averages probabilities over a KV head's query heads, SyncKV's B.1 takes their maximum.
With one query head for each KV head the two are the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Trace
from sfi_traces.replay.measured import check_one_model


def largest_top(traces: Sequence[Trace]) -> int:
    """Return the largest number of positions that every support of the traces has.

    Raises `TraceError` if one has no audit, lacks a layer or KV head, or is of another model.
    """
    for trace in traces:
        trace.require_audit()
        audit = trace.manifest["audit"]
        if audit["layers"] is not None:
            raise TraceError(
                f"trace {trace.path} must audit all layers, got {audit['layers']}; record it without audit.layers"
            )
    for trace in traces[1:]:
        check_one_model(traces[0], trace)
    return min(int(trace.manifest["audit"]["top"]) for trace in traces)


def requests_of(trace: Trace) -> list[int]:
    """List a trace's requests that have supports."""
    return sorted(trace.table("supports", ["request"])["request"].unique().to_pylist())


def request_supports(trace: Trace, request: int, top: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the top-k sets of a request's audited steps, [N, H, K] int32 padded with -1, for each layer.

    Steps with at most `top` = K cached tokens are left out, since all their sets would be equal. The trace
    must have passed `largest_top`.

    Raises `ConfigError` if the audit recorded fewer than `top` positions, `TraceError` if no step has more tokens, or
    for larger supports without masses, whose best are unknown.
    """
    most = trace.manifest["audit"]["top"]
    if top > most:
        raise ConfigError(f"top_k must be at most audit.top of trace {trace.path}, {most}, got {top}")
    if top < most:
        trace.require_masses()
    supports = Supports.read(Request.open(trace, request)).strongest(top)
    long_N = supports.length_N > top
    if not long_N.any():
        raise TraceError(
            f"trace {trace.path} must have steps with more than {top} tokens, the top-k, got none in request {request}"
        )
    lacking = max(0, top - supports.position_NUK.shape[-1])
    for layer in supports.layers:
        index_NHK = supports.position_NUK[long_N][:, supports.layer_U == layer]
        index_NHK = np.pad(index_NHK, ((0, 0), (0, 0), (0, lacking)), constant_values=-1)
        yield layer, torch.from_numpy(index_NHK)
