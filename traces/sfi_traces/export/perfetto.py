"""A trace as a timeline for ui.perfetto.dev or chrome://tracing, in Chrome's Trace Event Format.

Each request has a track of its steps, with a lossless run's verifications as marks, each stream one of its spans. Each
rank is a process; the first has the requests.
"""

import heapq
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
Event = dict[str, Any]
Track = tuple[str, int | str, int]  # "request" and number or "stream" and name; rank
Place = tuple[int, int]  # process and thread, in the format's terms


def perfetto_text(trace: Trace, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Write the timeline in pieces; `progress` gets the events so far, and all. Raises `TraceError` without timings."""
    request = Request.of(trace)
    request.connection.execute(PLACED_STEPS)
    steps = request.query("SELECT * FROM placed_steps ORDER BY begin_us")
    verifications = request.query(VERIFICATIONS)
    if not steps:
        raise TraceError(f"trace {trace.path} has no timings, which a timeline is made of")
    spans = request.single("SELECT count(*) AS n FROM timings")["n"]
    tracks = _tracks(request, steps)
    events = heapq.merge(
        _step_events(steps, tracks),
        _verification_events(verifications, tracks),
        _span_events(request, tracks),
        key=lambda event: event["ts"],
    )
    named = _names(trace, tracks)
    total = len(named) + 3 * len(steps) + len(verifications) + spans
    about = {key: trace.manifest.get(key) for key in ABOUT}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    yield head[:-1] + ', "traceEvents": [\n'
    done, written = 0, chain(named, events)
    while piece := list(islice(written, PIECE)):
        lines = ",\n".join(json.dumps(event) for event in piece)
        yield f",\n{lines}" if done else lines
        done += len(piece)
        progress(done, total)
    yield "\n]}\n"


def _tracks(request: Request, steps: list[Event]) -> dict[Track, Place]:
    tracks: list[Track] = [("request", number, 0) for number in sorted({step["request"] for step in steps})]
    streams = request.query("""
        SELECT coalesce(rank, 0) AS rank, stream FROM timings GROUP BY ALL ORDER BY rank, min(begin_us)
    """)
    tracks += [("stream", row["stream"], row["rank"]) for row in streams]
    return {track: (FIRST_PID + track[2], tid) for tid, track in enumerate(tracks, 1)}


def _names(trace: Trace, tracks: dict[Track, Place]) -> list[Event]:
    run = f"sfi {trace.manifest['policy']} on {trace.manifest['model']['name']}"
    named = []
    for rank in sorted({rank for *_, rank in tracks}):
        process = {"name": run if trace.ranks == 1 else f"{run}, rank {rank} of {trace.ranks}"}
        named.append(_event("M", "process_name", (FIRST_PID + rank, 0), 0, args=process))
    for (kind, which, _), place in tracks.items():
        name = f"steps of request {which}" if kind == "request" else which
        named.append(_event("M", "thread_name", place, 0, args={"name": name}))
        named.append(_event("M", "thread_sort_index", place, 0, args={"sort_index": place[1]}))
    return named


def _step_events(steps: list[Event], tracks: dict[Track, Place]) -> Iterator[Event]:
    shown = ("step", "token_text", "reason", "sentence", "context_tokens", "elapsed_us", "audited")
    for step in steps:
        kind = "slow" if step["slow"] else "fast"
        args = {name: step[name] for name in shown if step[name] not in (None, "")}
        place = tracks["request", step["request"], 0]
        yield _slice(step, kind, kind, place, args) | {"cname": COLORS[step["slow"]]}
        for column in ("attended_tokens", "read_ratio"):
            counter = column.replace("_", " ")
            name = f"{counter}, request {step['request']}"
            yield _event("C", name, (FIRST_PID, 0), step["begin_us"], args={counter: step[column]})


def _verification_events(rows: list[Event], tracks: dict[Track, Place]) -> Iterator[Event]:
    shown = ("step", "base", "drafted", "accepted", "reason", "evidence_position")
    for row in rows:
        args = {name: row[name] for name in shown if row[name] is not None}
        place = tracks["request", row["request"], 0]
        name = f"kept {row['accepted']} of {row['drafted']}"
        yield _event("i", name, place, row["begin_us"], s="t", cat="verification", args=args)


def _span_events(request: Request, tracks: dict[Track, Place]) -> Iterator[Event]:
    for span in request.trace.scan(request.connection, SPANS):
        args = {name: span[name] for name in ("step", "layer", "bytes") if span[name] is not None}
        place = tracks["stream", span["stream"], span["rank"]]
        yield _slice(span, span["name"], span["name"].partition(".")[0], place, args)


def _slice(row: Event, name: str, category: str, place: Place, args: Event) -> Event:
    # begin and end are rounded alike, so that an inner span stays inside
    event = _event("X", name, place, row["begin_us"], cat=category, args=args)
    return event | {"dur": round(round(row["end_us"], 3) - event["ts"], 3)}


def _event(phase: str, name: str, place: Place, at_us: float, **more: Any) -> Event:
    pid, tid = place
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": round(at_us, 3), **more}
