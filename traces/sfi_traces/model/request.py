"""One request of a trace: what was recorded of it, read when it is asked for, and what was in force at a step."""

from collections.abc import Collection
from functools import cached_property
from itertools import chain
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.rows import Rows
from sfi_traces.model.selections import Selections, StepReads
from sfi_traces.model.steps import Ints, Memory, Positions, Steps
from sfi_traces.model.supports import COLUMNS, MOST_POSITIONS, Supports, thinning
from sfi_traces.model.trace import Place, Trace, check_known, rows_of
from sfi_traces.overlap import Overlap, padded
from sfi_traces.schema import TABLES

# spans carry the first request of their run: `batch` is the last request with spans up to this one; a request that had
# to wait has a prefill later than step 0 of the batch
VIEWS = """
    CREATE TEMP VIEW batches AS
    SELECT steps.request, max(spans.request) AS batch
    FROM (SELECT DISTINCT request FROM steps) steps
    JOIN (SELECT DISTINCT request FROM timings) spans ON spans.request <= steps.request
    GROUP BY steps.request;
    CREATE TEMP VIEW timed_steps AS
    SELECT steps.* REPLACE (coalesce(batch_step, step) AS batch_step), batch
    FROM steps JOIN batches USING (request);
    CREATE TEMP VIEW prefills AS
    SELECT DISTINCT request, step FROM timings WHERE step <= 0 OR name = 'prefill'
"""
PAIRS = 4096  # of lists of positions compared at once
OF_SUPPORTS = (
    "layer", "head", "positions", "mass", "read", "retained_mass", "overlap_previous_step", "overlap_last_refresh",
)  # fmt: skip


class Request:
    """One request of a trace, or in SQL all of them; optionally one layer, and one KV head.

    Attributes:
        index: The request's number.
        requests: All requests that have a step.
        layer: The chosen layer, `head` the KV head; None for all.
        places: The chosen layers and KV heads of full-attention layers.
        shared: What several sections of a summary use and is computed once.
    """

    def __init__(
        self,
        trace: Trace,
        index: int | None = None,
        layer: int | None = None,
        head: int | None = None,
        *,
        every: bool = False,
    ) -> None:
        """Choose a request, by default the first; with `every`, none chosen means all in SQL.

        Raises `ConfigError` for a request, layer or KV head that the trace lacks, `TraceError` without a step.
        """
        table = trace.table("steps")
        if not len(table):
            raise TraceError(f"trace {trace.path} has no finished step")
        self.trace, self.layer, self.head = trace, layer, head
        self.requests: list[int] = sorted(pc.unique(table["request"]).to_pylist())
        check_known("request", [index], self.requests)
        layers = [entry for entry in trace.manifest["model"]["layers"] if every or entry["window"] is None]
        check_known("layer", [layer], [entry["layer"] for entry in layers])
        heads = [entry["heads"] for entry in layers if layer in (None, entry["layer"])]
        check_known("head", [head], range(max(heads, default=0)))
        self._in_sql = index if every or index is not None else self.requests[0]
        self.index: int = self.requests[0] if index is None else index
        self.rows = table.filter(rows_of(self.index)).sort_by("step")
        self.places: list[Place] = [
            (entry["layer"], number)
            for entry in layers
            if entry["window"] is None and layer in (None, entry["layer"])
            for number in range(entry["heads"])
            if head in (None, number)
        ]
        self.shared: dict[str, Any] = {}

    @classmethod
    def of(cls, trace: Trace, index: int | None = None, layer: int | None = None) -> Self:
        """Choose one request, or all of them in SQL; see `__init__`."""
        return cls(trace, index, layer, every=True)

    @cached_property
    def steps(self) -> Steps:
        """The request's steps, as arrays."""
        return Steps.of(self.rows, self.trace.manifest)

    @cached_property
    def memory(self) -> Memory:
        """Sizes of the memory at each step."""
        return Memory.of(self.trace.manifest["config"], self.steps.slow, self.steps.context.astype(np.int64))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.memory.length_N[0])

    @property
    def wanted(self) -> pc.Expression:
        """A filter for the rows of the recorded steps, of the layer and KV head."""
        # a killed run may have written other rows of a step before the step
        return rows_of(self.index, self.layer, self.head) & (pc.field("step") <= int(self.steps.step[-1]))

    @cached_property
    def compared(self) -> dict[int, dict[str, Any]]:
        """The row of the table `logits` of each step whose next token was compared with dense attention's."""
        rows = self.trace.rows("logits", TABLES["logits"].names, rows_of(self.index))
        last = int(self.steps.step[-1])
        return {row["step"]: row for row in rows.to_pylist() if row["step"] <= last}

    @cached_property
    def disagreeing(self) -> list[int]:
        """The steps where dense attention has another most probable token; lossless runs give its own."""
        steps = sorted(step for step, row in self.compared.items() if not row["argmax_agrees"])
        return [] if self.trace.lossless else steps

    @cached_property
    def prompt(self) -> list[str | None]:
        """The prompt's tokens by position; empty, or None for a token, where the trace has no text."""
        rows = self.trace.rows("prompts", ["position", "token_text"], rows_of(self.index)).sort_by("position")
        return list(rows["token_text"].to_pylist())

    @cached_property
    def words(self) -> list[str]:
        """The prompt's and the generated tokens by position; "" for one without text."""
        prompt = [text or "" for text in self.prompt]
        return [""] * (self.prompt_tokens - len(prompt)) + prompt + self.steps.text

    @property
    def segments(self) -> tuple[int, Ints | None]:
        """Sink tokens, and the first of each step's recent ones; 0 and None if all steps were slow."""
        if self.steps.slow.all():
            return 0, None
        return self.memory.sink, self.memory.start_N

    @cached_property
    def selections(self) -> Selections:
        """The selections, without their positions."""
        return Selections(self.trace, self.index, self.steps)

    def in_force(self, step: int) -> dict[Place, Positions]:
        """Return the selected positions in force at a step in each of `places`, as far as recorded."""
        return self.selections.by_place(self.selections.serving(step, set(self.places))) or {}

    def reads(self, row: int) -> StepReads:
        """Find what the step in row `row` of `steps` read in each of `places`."""
        slow = self.memory.slow_N[row] and not self.trace.reads_own_selection
        left_dense = self.trace.manifest["config"]["dense_layers"]
        dense = {place for place in self.places if slow or place[0] in left_dense}
        context, (sink, start_N) = int(self.memory.length_N[row]), self.segments
        recent = context if start_N is None else int(start_N[row])
        selected: dict[Place, Positions] | None = {}
        refreshed: list[int] = []
        if sparse := set(self.places) - dense:
            serving = self.selections.serving(int(self.steps.step[row]), sparse)
            selected = self.selections.by_place(serving)
            refreshed = sorted(set(self.selections.step[serving].tolist()))
        return StepReads(self.places, dense, sink, recent, context, selected, refreshed)

    @cached_property
    def support_rows(self) -> Rows:
        """The rows of the table `supports`, by step."""
        return Rows(self.trace, "supports", self.index, OF_SUPPORTS)

    @cached_property
    def selection_rows(self) -> Rows:
        """The rows of the table `selections`, by step."""
        return Rows(self.trace, "selections", self.index, ("lambda_star",))

    @cached_property
    def supports(self) -> Supports:
        """The supports of the layers and KV heads; raises `TraceError` where there are none.

        Beyond `MOST_POSITIONS`, of 8 bytes each and twice that for a moment, every n-th layer is read.
        """
        self.trace.require_audit()
        layer = self.trace.rows("supports", ["layer"], self.wanted)["layer"]
        if not len(layer):
            option = "--audit 1" if self.layer is None else f"--audit 1 --set audit.layers={self.layer}"
            raise TraceError(f"trace {self.trace.path} has no supports of these heads; record it with {option}")
        every = thinning(len(layer) * self.trace.manifest["audit"]["top"], MOST_POSITIONS)
        return self.supports_where(pc.field("layer").isin(pc.unique(layer).sort()[::every]))

    def supports_where(self, wanted: pc.Expression) -> Supports:
        """Read the supports that a filter wants, at least one."""
        rows = self.trace.rows("supports", COLUMNS, self.wanted & wanted)
        return Supports.of(self.trace.manifest, self.index, self.steps, rows)

    @cached_property
    def audited_layers(self) -> int:
        """Number of the chosen layers that have supports."""
        return len(pc.unique(self.trace.rows("supports", ["layer"], self.wanted)["layer"]))

    @cached_property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """DuckDB on the trace, with the rows of the request and layer as `chosen_steps`, ...

        `chosen_timings` has the first rank's alone, for ranks run in parallel, so that their times do not add up; a
        layer does not limit it.
        """
        connection, request = self.trace.connect(), self._in_sql
        connection.execute(VIEWS)
        for name, schema in TABLES.items():
            where = ["true"]
            if request is not None and name == "timings":
                steps = f"SELECT batch, batch_step FROM timed_steps WHERE request = {request:d}"  # noqa: S608 - a number
                # step -1 has pieces of the first prompts, which belong to step 0
                where.append(f"(request, greatest(step, 0)) IN ({steps})")
            elif request is not None:
                where.append(f"request = {request:d}")
            if name == "timings":
                where.append("coalesce(rank, 0) = 0")
            elif self.layer is not None and "layer" in schema.names:
                where.append(f"layer = {self.layer:d}")
            connection.execute(
                f"CREATE TEMP VIEW chosen_{name} AS SELECT * FROM {name} WHERE {' AND '.join(where)}"  # noqa: S608 - our names, numbers
            )
        return connection

    def query(self, sql: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
        """Return what a query finds."""
        return list(self.trace.scan(self.connection, sql, parameters))

    def single(self, sql: str, parameters: list[Any] | None = None) -> dict[str, Any]:
        """Return the only row that a query finds."""
        (row,) = self.query(sql, parameters)
        return row

    def compare(self, name: str, sql: str) -> None:
        """Make a table of a query's rows, with the `overlap` of its lists `first` and `second`.

        Not in SQL: DuckDB builds a hash table for each list, and a long trace has a million pairs.
        """
        pieces = []
        try:
            reader = self.connection.sql(sql).to_arrow_reader(PAIRS)
            for batch in chain([pa.RecordBatch.from_pylist([], reader.schema)], reader):
                first, second = (padded(batch.column(side)) for side in ("first", "second"))
                overlap = pa.array(Overlap.of(first, second).coefficient)
                pieces.append(batch.drop_columns(["first", "second"]).append_column("overlap", overlap))
        except (duckdb.InvalidInputException, OSError) as error:
            raise self.trace.unreadable() from error
        self.connection.register(name, pa.Table.from_batches(pieces))

    def choose(self, layers: Collection[int] | None, heads: Collection[int] | None, among: Collection[Place]) -> None:
        """Take some layers and KV heads of `among` as `places`, None for all; raises `ConfigError` for another."""
        places = sorted(among)
        for at, (name, chosen) in enumerate((("layer", layers), ("head", heads))):
            if chosen is not None:
                check_known(name, sorted(chosen), {place[at] for place in places})
                places = [place for place in places if place[at] in chosen]
        self.places = places
        for rows in (self.support_rows, self.selection_rows):
            rows.layers, rows.heads = ({place[at] for place in places} for at in (0, 1))
