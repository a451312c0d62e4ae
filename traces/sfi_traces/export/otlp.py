"""A trace as OpenTelemetry spans: JSON lines of OTLP's own schema, as the Collector's file exporter writes.

Each request is a trace of its own. Its root span follows the GenAI conventions. A step is a child of it, and
a phase a child of its step, or of the phase around it. Several requests of a batch share their phases, which
are those of the first one's step; the others' steps link to that one.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import chain, groupby, islice
from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.export.otlp_values import attributes, link, resource, span, trace_id_of
from sfi_traces.export.placed_steps import PLACED_STEPS
from sfi_traces.read.reader import Trace
from sfi_traces.summary.scope import Scope

LINE = 512  # spans in one line
REQUESTS = """
    WITH verified AS (
        SELECT request, sum(attended_tokens) FILTER (step > 0) AS attended FROM verifications GROUP BY request
    )
    SELECT request, min(begin_us) AS begin_us, max(end_us) AS end_us, count(*) AS steps,
        count(*) FILTER (slow) AS slow_steps,
        coalesce(any_value(verified.attended), sum(attended_tokens) FILTER (step > 0))
            / sum(context_tokens) FILTER (step > 0) AS read_ratio
    FROM placed_steps LEFT JOIN verified USING (request) GROUP BY request ORDER BY request
"""
STEPS = "SELECT * FROM placed_steps ORDER BY batch, batch_step, request"
# a span that holds others comes before them
SPANS = """
    SELECT coalesce(rank, 0) AS rank, request AS batch, greatest(step, 0) AS batch_step, layer, name, stream,
        begin_us, begin_us + elapsed_us AS end_us, bytes
    FROM timings ORDER BY rank, batch, batch_step, begin_us, elapsed_us DESC, layer, name
"""
OF_A_STEP = ("step", "slow", "reason", "steps_since_slow", "sentence", "attended_tokens", "context_tokens",
             "read_ratio", "audited", "drafted", "graphs", "slow_requests", "fast_requests", "cached_tokens",
             "moved_bytes", "bandwidth_share")  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k")

Row = dict[str, Any]
Owner = tuple[int, int]  # request and step


@dataclass(slots=True)
class SpanMaker:
    """Makes spans of rows.

    Attributes:
        trace: The trace.
        run_id: Names the run; all ids follow from it.
        began_ns: When the run began.
        prompts: Tokens of each request's prompt.
        owners: Whose step has the phases of a step of the batch.
    """

    trace: Trace
    run_id: str
    began_ns: int
    prompts: dict[int, int]
    owners: dict[tuple[int, int], Owner] = field(default_factory=dict)

    def request(self, row: Row) -> Row:
        """Make a request's root span."""
        manifest, request = self.trace.manifest, row["request"]
        model, sampling = manifest["model"]["name"], manifest.get("sampling") or {}
        chosen = {f"gen_ai.request.{name}": sampling.get(name) for name in SAMPLING}
        sampled = sampling.get("do_sample")
        told = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "sfi",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": manifest.get("max_new_tokens"),
            **(chosen | {"gen_ai.request.seed": manifest.get("seed")} if sampled else {}),
            "gen_ai.usage.input_tokens": self.prompts.get(request),
            "gen_ai.usage.output_tokens": row["steps"],
            **{f"sfi.{name}": row[name] for name in ("request", "slow_steps", "read_ratio")},
        }
        name = f"text_completion {model}"
        return self._span(name, request, row, told, self._id(request), None)

    def step(self, row: Row) -> Row:
        """Make a step's span; with a link, if another request's step has the phases of both."""
        request, step = row["request"], row["step"]
        owner = self.owners.setdefault((row["batch"], row["batch_step"]), (request, step))
        name = "slow step" if row["slow"] else "fast step"
        told = {f"sfi.{key}": row[key] for key in OF_A_STEP if row[key] != ""}
        made = self._span(name, request, row, told, self._id(request, step), self._id(request))
        if owner != (request, step):
            made["links"] = [link(trace_id_of(self.run_id, owner[0]), self._id(*owner))]
        return made

    def phases(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Make the spans of the phases, which come by rank and step of the batch."""
        keys = ("rank", "batch", "batch_step")
        for (rank, batch, step), group in groupby(rows, lambda row: tuple(row[k] for k in keys)):
            owner = self.owners.get((batch, step))  # a verification that gave no token has no row
            request = batch if owner is None else owner[0]
            above = self._id(request) if owner is None else self._id(*owner)
            around: dict[str, list[tuple[float, str]]] = {}
            for number, row in enumerate(group):
                open_ends = around.setdefault(row["stream"], [])
                while open_ends and open_ends[-1][0] < row["end_us"]:
                    open_ends.pop()
                parent = open_ends[-1][1] if open_ends else above
                own = self._id(request, "phase", rank, batch, step, number)
                open_ends.append((row["end_us"], own))
                told = {f"sfi.{name}": row[name] for name in ("layer", "bytes", "stream")}
                yield self._span(row["name"], request, row, told, own, parent)

    def _span(
        self, name: str, request: int, row: Row, told: Row, own: str, parent: str | None
    ) -> Row:
        begin_ns, end_ns = (
            self.began_ns + round(row[f"{end}_us"] * 1000) for end in ("begin", "end")
        )
        trace_id = trace_id_of(self.run_id, request)
        return span(name, trace_id, own, parent, begin_ns, end_ns, attributes(told))

    def _id(self, *names: int | str) -> str:
        return sha256(f"{self.run_id} {' '.join(map(str, names))}".encode()).hexdigest()[:16]


def otlp_text(trace: Trace, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Write the spans, a line for at most 512 of them.

    Args:
        trace: The trace.
        progress: Told after each line how many spans of how many are written.

    Raises:
        TraceError: No step was recorded or timed, or a part is damaged.
    """
    scope = Scope.of(trace)
    scope.connection.execute(PLACED_STEPS)
    requests = scope.rows(REQUESTS)
    if not requests:
        raise TraceError(f"trace {trace.path} has no timings, which spans are made of")
    maker = SpanMaker(
        trace,
        run_id_of(trace),
        began_ns(trace),
        {prompt["request"]: prompt["tokens"] for prompt in trace.manifest.get("prompts", [])},
    )
    counted = scope.row(
        "SELECT (SELECT count(*) FROM placed_steps) + (SELECT count(*) FROM timings) AS n"
    )
    total, done = counted["n"] + len(requests), 0
    for rank, made in _by_rank(scope, maker, requests):
        head = {"resource": resource(trace, rank)}
        for some in _pieces(made):
            of_sfi = {"name": "sfi", "version": trace.manifest.get("sfi_version", "")}
            line = {"resourceSpans": [{**head, "scopeSpans": [{"scope": of_sfi, "spans": some}]}]}
            yield json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
            done += len(some)
            progress(done, total)


def _by_rank(
    scope: Scope, maker: SpanMaker, requests: list[Row]
) -> Iterator[tuple[int, Iterator[Row]]]:
    # requests and steps are the first rank's; phases come after the steps that own them
    steps = scope.trace.scan(scope.connection, STEPS)
    yield scope.trace.rank, chain(map(maker.request, requests), map(maker.step, steps))
    spans = scope.trace.scan(scope.connection, SPANS)
    for rank, rows in groupby(spans, lambda row: row["rank"]):
        yield rank, maker.phases(rows)


def _pieces(spans: Iterator[Row]) -> Iterator[list[Row]]:
    while some := list(islice(spans, LINE)):
        yield some


def run_id_of(trace: Trace) -> str:
    """Return what names the run; of an older trace made of its beginning, its policy and its prompts."""
    manifest = trace.manifest
    if "run_id" in manifest:
        return str(manifest["run_id"])
    told = [manifest.get("created"), manifest["policy"], manifest.get("prompts")]
    return sha256(json.dumps(told).encode()).hexdigest()[:32]


def began_ns(trace: Trace) -> int:
    """Return when the run began, in nanoseconds since 1970; an older trace says it to the second."""
    manifest = trace.manifest
    if "began_unix_ns" in manifest:
        return int(manifest["began_unix_ns"])
    return int(datetime.fromisoformat(manifest["created"]).timestamp()) * 10**9
