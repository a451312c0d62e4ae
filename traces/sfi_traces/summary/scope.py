"""The part of a trace that is summarized: all of it, one request, one layer; and evenly chosen steps of it."""

from dataclasses import dataclass, field
from typing import Any, Self

import duckdb
import pyarrow as pa

from sfi_core.errors import TraceError
from sfi_traces.model.request import check_known
from sfi_traces.model.trace import Trace, of_steps
from sfi_traces.overlap import Overlap, padded
from sfi_traces.schema import KEY, TABLES

QUANTILES = (0.05, 0.5, 0.95)
PAIRS = 4096  # of lists of positions compared at once
SAMPLED = "sampled_selections"
MOST_POSITIONS = 1 << 22  # read at once


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows of a trace as DuckDB views `chosen_steps`, `chosen_supports`, ... beside the whole tables.

    `chosen_timings` has the first rank's alone. `request` and `layer` are None for all; `kept` has what
    several sections use and is read once.
    """

    trace: Trace
    connection: duckdb.DuckDBPyConnection
    request: int | None
    layer: int | None
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, request: int | None = None, layer: int | None = None) -> Self:
        """Open a trace and make the views.

        Raises `ConfigError` for a request or layer that the trace lacks, `TraceError` without a step or for a truncated
        part.
        """
        scope = cls(trace, trace.connect(), request, layer)
        requests = [row["request"] for row in scope.rows("SELECT DISTINCT request FROM steps ORDER BY 1")]
        if not requests:
            raise TraceError(f"trace {trace.path} has no finished step")
        check_known("request", [request], requests)
        layers = [place["layer"] for place in trace.manifest["model"]["layers"]]
        check_known("layer", [layer], layers)
        scope._choose()
        return scope

    def rows(self, query: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
        """Return what a query finds."""
        return list(self.trace.scan(self.connection, query, parameters))

    def row(self, query: str, parameters: list[Any] | None = None) -> dict[str, Any]:
        """Return the only row that a query finds."""
        (found,) = self.rows(query, parameters)
        return found

    def compare(self, name: str, query: str) -> None:
        """Make a table of a query's rows, with the `overlap` of its lists `first` and `second`.

        Not in SQL: DuckDB builds a hash table for each list, and a long trace has a million pairs.
        """
        pieces = []
        for batch in self.trace.batches(self.connection, query, PAIRS):
            first, second = (padded(batch.column(side)) for side in ("first", "second"))
            overlap = pa.array(Overlap.of(first, second).coefficient)
            rest = batch.drop_columns(["first", "second"])
            pieces.append(rest.append_column("overlap", overlap))
        self.connection.register(name, pa.Table.from_batches(pieces))

    def pick(self, name: str, table: str, keys: pa.Table) -> None:
        """Make a view of a table's chosen rows of some requests and steps; only these are read.

        Not through DuckDB, which decodes the lists of every row in each scan.
        """
        rows = self.trace.rows(table, TABLES[table].names, of_steps(keys["step"].to_numpy()))
        self.connection.register(f"{name}_rows", rows)
        self.connection.register(f"{name}_keys", keys)
        layer = "true" if self.layer is None else f"layer = {self.layer:d}"
        self.connection.execute(f"""
            CREATE OR REPLACE TEMP VIEW {name} AS
            SELECT * FROM {name}_rows SEMI JOIN {name}_keys USING (request, step) WHERE {layer}
        """)  # noqa: S608 - our own names and a number

    def _choose(self) -> None:
        # spans carry the first request of their run: the last request with spans up to this one
        self.connection.execute("""
            CREATE TEMP VIEW batches AS
            SELECT steps.request, max(spans.request) AS batch
            FROM (SELECT DISTINCT request FROM steps) steps
            JOIN (SELECT DISTINCT request FROM timings) spans ON spans.request <= steps.request
            GROUP BY steps.request
        """)
        self.connection.execute("""
            CREATE TEMP VIEW timed_steps AS
            SELECT steps.* REPLACE (coalesce(batch_step, step) AS batch_step), batch
            FROM steps JOIN batches USING (request)
        """)
        # a request that had to wait has a prefill later than step 0 of the batch
        self.connection.execute("""
            CREATE TEMP VIEW prefills AS
            SELECT DISTINCT request, step FROM timings WHERE step <= 0 OR name = 'prefill'
        """)
        for name, schema in TABLES.items():
            where = ["true"]
            if self.request is not None and name == "timings":
                mine = f"SELECT batch, batch_step FROM timed_steps WHERE request = {self.request:d}"  # noqa: S608 - a number
                # step -1 has pieces of the first prompts, which belong to step 0
                where.append(f"(request, greatest(step, 0)) IN ({mine})")
            elif self.request is not None:
                where.append(f"request = {self.request:d}")
            if name == "timings":  # one rank's: ranks run in parallel, so their times do not add up
                where.append("coalesce(rank, 0) = 0")
            if self.layer is not None and "layer" in schema.names and name != "timings":
                where.append(f"layer = {self.layer:d}")
            self.connection.execute(
                f"CREATE TEMP VIEW chosen_{name} AS SELECT * FROM {name} WHERE {' AND '.join(where)}"  # noqa: S608 - our names, numbers
            )


def spread(column: str) -> str:
    """Write the SQL of a column's distribution, without nulls, NaN and infinities."""
    value = f"CASE WHEN isfinite({column}) THEN {column}::DOUBLE END"
    p5, p50, p95 = (f"quantile_cont({value}, {share})" for share in QUANTILES)
    return (
        f"{{'n': count({value}), 'mean': avg({value}), 'sd': stddev_samp({value}),"
        f" 'p5': {p5}, 'p50': {p50}, 'p95': {p95}, 'min': min({value}), 'max': max({value})}}"
    )


def sample_selections(scope: Scope) -> int:
    """Make the view `sampled_selections`, with positions, of every n-th refresh of a request; return n.

    The view `sampled_refreshes` includes selections without positions.
    """
    size = scope.row("SELECT coalesce(sum(selected), 0) AS positions FROM chosen_selections")
    every = 1 + int(size["positions"]) // MOST_POSITIONS
    if SAMPLED in scope.kept:
        return every
    picked = scope.rows(f"""
        SELECT request, step FROM (SELECT DISTINCT request, step FROM chosen_selections)
        QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
    """)  # noqa: S608 - a number
    keys = {name: [row[name] for row in picked] for name in ("request", "step")}
    scope.pick("sampled_refreshes", "selections", pa.table(keys, pa.schema(KEY)))
    scope.connection.execute("""
        CREATE OR REPLACE TEMP VIEW sampled_selections AS
        SELECT * FROM sampled_refreshes WHERE positions IS NOT NULL
    """)
    scope.kept[SAMPLED] = True
    return every


def sample_supports(scope: Scope) -> None:
    """Make the view `sampled_supports`: rows with `read` of every n-th audited fast step, with `position`."""
    size = scope.row("SELECT count(*) AS rows FROM chosen_supports WHERE read IS NOT NULL")
    top = int((scope.trace.manifest.get("audit") or {}).get("top", 1))
    every = 1 + int(size["rows"]) * top // MOST_POSITIONS
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW sampled_supports AS
        SELECT * FROM chosen_supports JOIN (
            SELECT request, step, position FROM chosen_steps WHERE audited AND NOT slow
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
        ) USING (request, step)
        WHERE read IS NOT NULL
    """)  # noqa: S608 - a number
