"""Spans, attributes and resources in OTLP's JSON.

Ids are hexadecimal, 64-bit integers are text, and enums are numbers.
"""

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from sfi_traces.read.reader import Trace

INTERNAL = 1  # a span's kind: the model runs in the same process
OF_THE_RUN = ("policy", "preset", "backend", "device", "lossless")

Json = dict[str, Any]


def trace_id_of(run_id: str, request: int) -> str:
    """Return a request's trace id, the same at every export."""
    return sha256(f"{run_id} request {request}".encode()).hexdigest()[:32]


def span(
    name: str,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    begin_ns: int,
    end_ns: int,
    told: list[Json],
) -> Json:
    """Return a span."""
    parent = {} if parent_id is None else {"parentSpanId": parent_id}
    return {
        "traceId": trace_id,
        "spanId": span_id,
        **parent,
        "name": name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": told,
    }


def link(trace_id: str, span_id: str) -> Json:
    """Return a link to a span of another trace, whose phases are also those of this one."""
    return {"traceId": trace_id, "spanId": span_id, "attributes": attributes({"sfi.link": "batch"})}


def attributes(told: Mapping[str, Any]) -> list[Json]:
    """Return attributes of plain values; what is None, or no finite number, is left out."""
    return [
        {"key": key, "value": _value(value)}
        for key, value in told.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    ]


def resource(trace: Trace, rank: int) -> Json:
    """Say what made the spans: the run, and the rank that they are of."""
    manifest = trace.manifest
    model = manifest["model"]
    told = {
        "service.name": "sfi",
        "service.version": manifest.get("sfi_version"),
        "sfi.run_id": manifest.get("run_id"),
        "sfi.rank": rank,
        "sfi.ranks": trace.ranks,
        "sfi.model": model["name"],
        "sfi.architecture": model.get("architecture"),
        "sfi.dtype": model.get("dtype"),
        **{f"sfi.{name}": manifest.get(name) for name in OF_THE_RUN},
        **{f"sfi.version.{name}": text for name, text in manifest.get("versions", {}).items()},
    }
    return {"attributes": attributes(told)}


def _value(value: Any) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
