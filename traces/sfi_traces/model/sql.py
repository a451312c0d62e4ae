"""SQL over a part of a trace: views of its chosen rows."""

import duckdb

from sfi_traces.model.trace import Trace
from sfi_traces.schema import TABLES

QUANTILES = (0.05, 0.5, 0.95)
# spans carry the first request of their run: the last request with spans up to this one
BATCHES = """
    CREATE TEMP VIEW batches AS
    SELECT steps.request, max(spans.request) AS batch
    FROM (SELECT DISTINCT request FROM steps) steps
    JOIN (SELECT DISTINCT request FROM timings) spans ON spans.request <= steps.request
    GROUP BY steps.request
"""
TIMED_STEPS = """
    CREATE TEMP VIEW timed_steps AS
    SELECT steps.* REPLACE (coalesce(batch_step, step) AS batch_step), batch
    FROM steps JOIN batches USING (request)
"""
# a request that had to wait has a prefill later than step 0 of the batch
PREFILLS = """
    CREATE TEMP VIEW prefills AS
    SELECT DISTINCT request, step FROM timings WHERE step <= 0 OR name = 'prefill'
"""


def connect_to_part(trace: Trace, request: int | None, layer: int | None) -> duckdb.DuckDBPyConnection:
    """Open DuckDB on the tables, and on the rows of a request and layer as `chosen_steps`, ...; None for all.

    `chosen_timings` has the first rank's alone, for ranks run in parallel, so that their times do not add up; a layer
    does not limit it.
    """
    connection = trace.connect()
    for view in (BATCHES, TIMED_STEPS, PREFILLS):
        connection.execute(view)
    for name, schema in TABLES.items():
        where = ["true"]
        if request is not None and name == "timings":
            batch_steps = f"SELECT batch, batch_step FROM timed_steps WHERE request = {request:d}"  # noqa: S608 - a number
            # step -1 has pieces of the first prompts, which belong to step 0
            where.append(f"(request, greatest(step, 0)) IN ({batch_steps})")
        elif request is not None:
            where.append(f"request = {request:d}")
        if name == "timings":
            where.append("coalesce(rank, 0) = 0")
        elif layer is not None and "layer" in schema.names:
            where.append(f"layer = {layer:d}")
        connection.execute(
            f"CREATE TEMP VIEW chosen_{name} AS SELECT * FROM {name} WHERE {' AND '.join(where)}"  # noqa: S608 - our names, numbers
        )
    return connection


def distribution(column: str) -> str:
    """Write the SQL of a column's distribution, without nulls, NaN and infinities."""
    value = f"CASE WHEN isfinite({column}) THEN {column}::DOUBLE END"
    p5, p50, p95 = (f"quantile_cont({value}, {share})" for share in QUANTILES)
    return (
        f"{{'n': count({value}), 'mean': avg({value}), 'sd': stddev_samp({value}),"
        f" 'p5': {p5}, 'p50': {p50}, 'p95': {p95}, 'min': min({value}), 'max': max({value})}}"
    )


def bins(column: str, name: str) -> str:
    """Write the SQL of a whole number's bin, of 1, 2, 3-4, 5-8, ..., as columns `from_NAME` and `to_NAME`."""
    first = f"CASE WHEN {column} <= 2 THEN {column} ELSE 2 ** (ceil(log2({column})) - 1) + 1 END"
    last = f"CASE WHEN {column} <= 2 THEN {column} ELSE 2 ** ceil(log2({column})) END"
    return f"({first})::INT AS from_{name}, ({last})::INT AS to_{name}"
