"""Summarizes a trace as plain values: the numbers of `sfi trace show`."""

from typing import Any

from sfi_traces.read.reader import Trace
from sfi_traces.summary.corrections import corrections, recalls
from sfi_traces.summary.coverage import coverage_facts
from sfi_traces.summary.facts import run_facts, step_facts, trigger_tokens
from sfi_traces.summary.lossless import lossless_facts
from sfi_traces.summary.query_cosine import query_cosine
from sfi_traces.summary.ranks import rank_facts
from sfi_traces.summary.scope import Scope
from sfi_traces.summary.similarity import head_similarity, over_time
from sfi_traces.summary.speed import batch_reads, break_even, latency, phases
from sfi_traces.summary.supports import (
    audit_facts,
    logits_facts,
    overlap_by_lag,
    selection_facts,
    stability,
)

MISSING = {  # sections that a trace may lack, and what records them
    "stability": "overlap of consecutive supports (record with --audit 1)",
    "lags": "overlap by lag since the refresh (record with --audit N)",
    "drift": "overlap with the prompt's support (record with --audit N, step 0 and a later one)",
    "locality": "overlap of every two steps (record with --audit N, two steps or more)",
    "head_similarity": "similarity of heads within and between layers (record two layers with --audit N)",
    "query_cosine": "query cosine by layer and head (record with --audit N, a step after step 0)",
    "audit": "retained mass, output error, query cosine (record with --audit N)",
    "logits": "next-token KL and argmax agreement (record a sparse policy with --audit N)",
    "selections": "lambda* and overlap of selections (record a policy that selects, such as --policy sfi)",
    "phases": "time by phase and break-even (the table timings is empty)",
}
SPANS = (
    "phases inside replayed steps (record with --set trace.spans=true, which gives up CUDA graphs)"
)
OF_ALL_RUNS = ("selections", "phases")  # the only ones missed in a lossless run, which has no audit


def summarize(trace: Trace, request: int | None = None, layer: int | None = None) -> dict[str, Any]:
    """Summarize a trace, or one request or layer.

    A section without data is None, and `missing` says what records it. `layer` does not limit steps, latency
    and phases.

    Raises:
        ConfigError: The trace has no such request or layer.
        TraceError: No step was recorded, or a part is damaged.
    """
    scope = Scope.of(trace, request, layer)
    drift, locality = over_time(scope)
    steps = step_facts(scope)
    sections: dict[str, Any] = {
        "stability": stability(scope),
        "lags": overlap_by_lag(scope),
        "drift": drift,
        "locality": locality,
        "head_similarity": head_similarity(scope),
        "query_cosine": query_cosine(scope),
        "audit": audit_facts(scope),
        "logits": logits_facts(scope),
        "selections": selection_facts(scope),
        "phases": phases(scope),
    }
    from sfi_traces.health import judge  # noqa: PLC0415 - it reads this package's scope

    return {
        "trace": str(trace.path),
        "request": request,
        "layer": layer,
        "health": judge(scope),
        "run": run_facts(scope),
        "ranks": rank_facts(scope),
        "steps": steps,
        "lossless": lossless_facts(scope),
        "triggers": trigger_tokens(scope),
        **sections,
        "coverage": coverage_facts(scope),
        "corrections": corrections(scope),
        "recalls": recalls(scope),
        "latency": latency(scope),
        "break_even": break_even(scope),
        "reads": batch_reads(scope),
        "missing": [
            *(
                reason.partition(" (")[0] if trace.imported else reason
                for name, reason in MISSING.items()
                if sections[name] is None and (name in OF_ALL_RUNS or not trace.lossless)
            ),
            *([SPANS] if steps["replayed"] and trace.manifest.get("spans") is None else []),
        ],
    }


__all__ = ["Scope", "summarize"]
