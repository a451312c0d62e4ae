"""Summarizes a trace as plain values: the numbers of `sfi trace show`."""

from collections.abc import Callable, Iterable
from typing import Any

from sfi_traces.health import judge
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.summary import facts, similarity, supports

SECTIONS: dict[str, Callable[[Request], Any]] = {  # in the document's order
    "run": facts.run_facts,
    "answers": facts.answers,
    "steps": facts.step_facts,
    "lossless": facts.lossless_facts,
    "triggers": facts.trigger_tokens,
    "stability": supports.stability,
    "drift": similarity.drift_facts,
    "head_similarity": similarity.head_similarity,
    "query_cosine": supports.query_cosine,
    "audit": supports.audit_facts,
    "logits": supports.logits_facts,
    "disagreements": supports.disagreements,
    "selections": supports.selection_facts,
    "phases": facts.phases,
    "corrections": supports.corrections,
    "recalls": supports.recalls,
    "latency": facts.latency,
}
MISSING = {  # sections that a trace may lack, and what records them
    "stability": "overlap of consecutive supports (record with --audit 1)",
    "drift": "overlap with the prompt's support (record with --audit N, step 0 and a later one)",
    "head_similarity": "similarity of heads within and between layers (record two layers with --audit N)",
    "query_cosine": "query cosine by layer and head (record with --audit N, a step after step 0)",
    "audit": "retained mass, output error, query cosine (record with --audit N)",
    "logits": "next-token KL and argmax agreement (record a sparse policy with --audit N)",
    "selections": "lambda* and overlap of selections (record a policy that selects, such as --policy sfi)",
    "phases": "time by phase (the table timings is empty)",
}
SPANS = "phases inside replayed steps (record with --set trace.spans=true, which gives up CUDA graphs)"
OF_ALL_RUNS = ("selections", "phases")  # the only ones missed in a lossless run, which has no audit


def summarize(trace: Trace, request: int | None = None, layer: int | None = None) -> dict[str, Any]:
    """Summarize a trace, or one request or layer; a layer does not limit steps, latency and phases.

    A section without data is None, and `missing` says what records it.

    Raises `ConfigError` for a request or layer that the trace lacks, `TraceError` without a step or for a damaged part.
    """
    part = Request.of(trace, request, layer)
    document: dict[str, Any] = {
        "trace": str(trace.path),
        "request": request,
        "layer": layer,
        "health": judge(part),
        **sections(part, SECTIONS),
    }
    document["missing"] = [
        reason.partition(" (")[0] if trace.imported else reason
        for name, reason in MISSING.items()
        if document[name] is None and (name in OF_ALL_RUNS or not trace.lossless)
    ]
    if document["steps"]["replayed"] and trace.manifest.get("spans") is None:
        document["missing"].append(SPANS)
    return document


def sections(request: Request, names: Iterable[str]) -> dict[str, Any]:
    """Compute some of the sections; one without data is None."""
    return {name: SECTIONS[name](request) for name in names}


__all__ = ["sections", "summarize"]
