"""Reads part files, which may be a stranger's: every value that comes out of one is in its table's range."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sfi_core.settings.fields import LARGEST
from sfi_traces.schema import MOST_HEADS, MOST_LAYERS, MOST_TOKENS, TABLES

MOST_VALUES = 1 << 27  # of a column of a part: half a GB of int32
DAMAGED = (OSError, pa.ArrowException, ValueError, OverflowError, MemoryError)  # what Arrow raises for a damaged part
# columns that are never null, of every table that has them
NEVER_NULL = {
    "request", "step", "layer", "head", "position", "slow", "reason", "sentence", "trigger", "attended_tokens",
    "context_tokens", "base", "drafted", "accepted", "begin_us", "name", "stream", "rows", "kl_next_token",
    "argmax_agrees", "steps_since_slow", "read_ratio", "elapsed_us", "positions",
}  # fmt: skip
MAY_BE_NULL = {
    "selections.positions",
    "selections.reason",
    "steps.drafted",
    "steps.elapsed_us",
    "timings.layer",
    "verifications.elapsed_us",
}  # but for these
# the least and the greatest number, where they are not -1 and `MOST_TOKENS`
RANGES = {
    "context_tokens": (1, MOST_TOKENS), "layer": (0, MOST_LAYERS - 1), "head": (0, MOST_HEADS - 1),
    **dict.fromkeys(("position", "base", "accepted"), (0, MOST_TOKENS)), "request": (0, LARGEST),
    **dict.fromkeys(("token_id", "draft_token_id", "batch_step", "timings.step"), (-1, LARGEST)),
    **dict.fromkeys(("bytes", "cached_tokens", "moved_bytes", "rows"), (0, LARGEST)),
}  # fmt: skip
FINITE = {"attended_tokens", "selection_tokens", "read_ratio", "begin_us", "elapsed_us", "mass"}


def open_part(part: Path) -> parquet.FileMetaData:
    """Return a part's metadata; raises one of `DAMAGED` where it cannot be read or claims too much."""
    if not part.is_file():
        raise OSError("it must be a regular file")
    metadata = parquet.read_metadata(part)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        claimed = max((group.column(at).num_values for at in range(metadata.num_columns)), default=0)
        if max(claimed, group.num_rows) > MOST_VALUES:
            raise ValueError(f"it must have at most {MOST_VALUES:,} values in a row group, got {claimed:,}")
    return metadata


def check_part(part: Path, table: str) -> None:
    """Check a part whose rows DuckDB will read, by its statistics; raises one of `DAMAGED`.

    A part without them, as another writer may leave it, or with other types is read, but for its lists.
    """
    metadata, schema = open_part(part), TABLES[table]
    written = metadata.schema.to_arrow_schema()
    chunks = [
        (column.path_in_schema.partition(".")[0], column.statistics)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for column in map(group.column, range(metadata.num_columns))
    ]
    plain = [name for name in schema.names if not pa.types.is_list(schema.field(name).type)]
    if any(name not in written.names or written.field(name).type != schema.field(name).type for name in plain) or any(
        name in plain and (statistics is None or not statistics.has_null_count) for name, statistics in chunks
    ):
        read_part(part, table, plain)
    for name, statistics in chunks:
        if name in plain and statistics is not None:
            _check_nulls(table, name, statistics.null_count)
        if statistics is not None and statistics.has_min_max and isinstance(statistics.min, int):
            _check_range(table, name, statistics.min, statistics.max)


def checked(rows: pa.Table, table: str) -> pa.Table:
    """Return rows of a table; raises ValueError for a null, a number or a list that the table cannot have."""
    for name in rows.column_names:
        column = rows[name]
        _check_nulls(table, name, column.null_count)
        if pa.types.is_list(column.type):
            column = pc.list_flatten(column)
            if column.null_count:
                raise ValueError(f"{name} must have no null inside, got one")
        if name in FINITE and pc.all(pc.is_finite(column)).as_py() is False:
            raise ValueError(f"{name} must be finite, got NaN or infinity")
        if pa.types.is_integer(column.type) and (ends := pc.min_max(column).as_py())["min"] is not None:
            _check_range(table, name, **ends)
    lists = [name for name in ("positions", "mass", "read") if name in rows.column_names]
    sizes = {name: pc.list_value_length(rows[name]) for name in lists}
    for name, size in sizes.items():
        if pc.all(pc.equal(size, sizes.get("positions", size))).as_py() is False:
            raise ValueError(f"{name} must be as many as the positions, got others")
    return rows


def _check_nulls(table: str, name: str, nulls: int) -> None:
    if nulls and name in NEVER_NULL and f"{table}.{name}" not in MAY_BE_NULL:
        raise ValueError(f"{name} must have a value, got null")


def _check_range(table: str, name: str, min: int, max: int) -> None:  # noqa: A002 - as Arrow names them
    least, most = RANGES.get(f"{table}.{name}", RANGES.get(name, (-1, MOST_TOKENS)))
    if min < least or max > most:
        raise ValueError(f"{name} must be in {least} to {most:,}, got {min if min < least else max:,}")


def read_part(part: Path, table: str, columns: list[str] | None = None) -> pa.Table:
    """Read columns of a part, those that it lacks as nulls; raises one of `DAMAGED`."""
    open_part(part)
    return checked(parquet.read_table(part, columns=columns, schema=TABLES[table]), table)
