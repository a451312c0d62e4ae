"""Top-k sets that a trace's audit recorded, by layer and KV head, for `sfi tune heads`.

Paper gap: the audit averages probabilities over a KV head's query heads, SyncKV's B.1 takes their maximum.
With one query head for each KV head the two are the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.read.reader import Trace
from sfi_traces.replay.measured import check_one_model
from sfi_traces.views.stability import ViewSupports

LAST_STEP = 2**31 - 1


def largest_top(traces: Sequence[Trace]) -> int:
    """Return the largest number of positions that every support of the traces has.

    Raises:
        TraceError: A trace has no audit, lacks a layer or KV head, or is of another model.
    """
    for trace in traces:
        trace.require_audit()
        audit = trace.manifest["audit"]
        if audit["layers"] is not None:
            raise TraceError(
                f"trace {trace.path} must audit all layers, got {audit['layers']}; "
                "record it without audit.layers"
            )
    for trace in traces[1:]:
        check_one_model(traces[0], trace)
    return min(int(trace.manifest["audit"]["top"]) for trace in traces)


def requests_of(trace: Trace) -> list[int]:
    """List a trace's requests that have supports."""
    found: list[int] = trace.table("supports", ["request"])["request"].unique().to_pylist()
    return sorted(found)


def request_supports(trace: Trace, request: int, top: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the top-k sets of a request's audited steps, [N, H, K] int32 padded with -1, for each layer.

    Steps with at most `top` = K cached tokens are left out, since all their sets would be equal. The trace
    must have passed `largest_top`.

    Raises:
        ConfigError: The audit recorded fewer than `top` positions.
        TraceError: No step has more than `top` tokens.
    """
    most = trace.manifest["audit"]["top"]
    if top > most:
        raise ConfigError(
            f"top_k must be at most audit.top of trace {trace.path}, {most}, got {top}"
        )
    supports = ViewSupports.read(trace, request, LAST_STEP).strongest(top)
    long = _long(trace, request, top)
    chosen = [index for index, step in enumerate(supports.step.tolist()) if step in long]
    if not chosen:
        raise TraceError(
            f"trace {trace.path} must have steps with more than {top} tokens, the top-k, got none "
            f"in request {request}"
        )
    for layer in sorted({layer for layer, _ in supports.sets}):
        heads = sorted(head for other, head in supports.sets if other == layer)
        index_NHK = np.full((len(chosen), len(heads), top), -1, np.int32)
        for place, head in enumerate(heads):
            for row, index in enumerate(chosen):
                positions = supports.sets[layer, head][index]
                index_NHK[row, place, : len(positions)] = positions
        yield layer, torch.from_numpy(index_NHK)


def _long(trace: Trace, request: int, top: int) -> set[int]:
    table = trace.table("steps", ["request", "step", "context_tokens"]).to_pydict()
    rows = zip(table["request"], table["step"], table["context_tokens"], strict=True)
    return {step for of, step, tokens in rows if of == request and tokens > top}
