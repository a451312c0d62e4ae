"""A trace as a timeline for ui.perfetto.dev or chrome://tracing, in Chrome's Trace Event Format.

Each request has a track of its steps, with a lossless run's verifications as marks, each stream one of its spans. Each
rank is a process; the first has the requests.
"""

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace

FIRST_PID = 1  # of rank 0
PIECE = 1000  # events in one piece of text
COLORS = {True: "terrible", False: "good"}  # Chrome's color names, by whether a step is slow
ABOUT = ("sfi_version", "created", "policy", "preset", "backend", "device", "config", "model")
# a step lasts from its first span to its last, and ends before the request's next step; all pieces of a
# prompt are part of step 0
PLACED_STEPS = """
    CREATE TEMP VIEW placed_steps AS
    WITH extents AS (
        SELECT request AS batch, greatest(step, 0) AS batch_step, min(begin_us) AS begin_us,
            max(begin_us + elapsed_us) AS end_us
        FROM chosen_timings GROUP BY ALL
    )
    SELECT timed_steps.*, extents.begin_us,
        least(end_us, lead(begin_us) OVER (PARTITION BY request ORDER BY step)) AS end_us
    FROM timed_steps JOIN extents USING (batch, batch_step)
"""
VERIFICATIONS = """
    SELECT verifications.*, placed_steps.begin_us
    FROM verifications JOIN placed_steps USING (request, step) ORDER BY begin_us
"""
# outer spans come before the spans they contain
SPANS = """
    SELECT coalesce(rank, 0) AS rank, request, step, layer, name, stream, begin_us,
        begin_us + elapsed_us AS end_us, bytes
    FROM timings ORDER BY begin_us, elapsed_us DESC
"""
STREAMS = "SELECT coalesce(rank, 0) AS rank, stream FROM timings GROUP BY ALL ORDER BY rank, min(begin_us)"
OF_STEP = ("step", "token_text", "reason", "sentence", "attended_tokens", "context_tokens", "elapsed_us", "audited")
OF_VERIFICATION = ("step", "base", "drafted", "accepted", "reason", "evidence_position")
Event = dict[str, Any]
Place = tuple[int, int]  # process and thread, in the format's terms
Tracks = dict[tuple[int, str], Place]  # by rank and name


def perfetto_text(trace: Trace, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Write the timeline in pieces; `progress` gets the events so far, and all. Raises `TraceError` without timings."""
    request = Request.of(trace)
    request.connection.execute(PLACED_STEPS)
    steps = request.query("SELECT * FROM placed_steps ORDER BY begin_us")
    verifications = request.query(VERIFICATIONS)
    if not steps:
        raise TraceError(f"trace {trace.path} has no timings, which a timeline is made of")
    spans = request.single("SELECT count(*) AS n FROM timings")["n"]
    names = [(0, _track(number)) for number in sorted({step["request"] for step in steps})]
    names += [(row["rank"], row["stream"]) for row in request.query(STREAMS)]
    tracks = {track: (FIRST_PID + track[0], thread) for thread, track in enumerate(names, 1)}
    named = list(_names(trace, tracks))
    events = chain(
        named,
        (_step_event(step, tracks) for step in steps),
        (_verification_event(row, tracks) for row in verifications),
        (_span_event(span, tracks) for span in trace.scan(request.connection, SPANS)),
    )
    total = len(named) + len(steps) + len(verifications) + spans
    about = {key: trace.manifest.get(key) for key in ABOUT}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    yield head[:-1] + ', "traceEvents": [\n'
    done = 0
    while piece := list(islice(events, PIECE)):
        lines = ",\n".join(json.dumps(event) for event in piece)
        yield f",\n{lines}" if done else lines
        done += len(piece)
        progress(done, total)
    yield "\n]}\n"


def _track(request: int) -> str:
    return f"steps of request {request}"


def _names(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    run = f"sfi {trace.manifest['policy']} on {trace.manifest['model']['name']}"
    for rank in sorted({rank for rank, _ in tracks}):
        process = {"name": run if trace.ranks == 1 else f"{run}, rank {rank} of {trace.ranks}"}
        yield _event("M", "process_name", (FIRST_PID + rank, 0), 0, args=process)
    for (_, name), place in tracks.items():
        yield _event("M", "thread_name", place, 0, args={"name": name})
        yield _event("M", "thread_sort_index", place, 0, args={"sort_index": place[1]})


def _step_event(step: Event, tracks: Tracks) -> Event:
    kind = "slow" if step["slow"] else "fast"
    args = {name: step[name] for name in OF_STEP if step[name] not in (None, "")}
    return _slice(step, kind, kind, tracks[0, _track(step["request"])], args) | {"cname": COLORS[step["slow"]]}


def _verification_event(row: Event, tracks: Tracks) -> Event:
    args = {name: row[name] for name in OF_VERIFICATION if row[name] is not None}
    name, place = f"kept {row['accepted']} of {row['drafted']}", tracks[0, _track(row["request"])]
    return _event("i", name, place, row["begin_us"], s="t", cat="verification", args=args)


def _span_event(span: Event, tracks: Tracks) -> Event:
    args = {name: span[name] for name in ("step", "layer", "bytes") if span[name] is not None}
    return _slice(span, span["name"], span["name"].partition(".")[0], tracks[span["rank"], span["stream"]], args)


def _slice(row: Event, name: str, category: str, place: Place, args: Event) -> Event:
    # begin and end are rounded alike, so that an inner span stays inside
    event = _event("X", name, place, row["begin_us"], cat=category, args=args)
    return event | {"dur": round(round(row["end_us"], 3) - event["ts"], 3)}


def _event(phase: str, name: str, place: Place, at_us: float, **more: Any) -> Event:
    process, thread = place
    return {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": round(at_us, 3), **more}
