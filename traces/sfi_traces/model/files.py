"""Reads a trace's manifest and part files, which may be a stranger's: every value that comes out is in its range."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from sfi_core.errors import TraceError
from sfi_core.machine.files import read_file
from sfi_core.machine.text import parse_json, printable, shown
from sfi_core.settings.fields import LARGEST
from sfi_traces.schema import MANIFEST, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, SCHEMA_VERSION, TABLES

MOST_PLACES = 1 << 18  # layers and KV heads
Line = Annotated[str, AfterValidator(printable)]  # is shown


def _number(most: int, least: int = 0) -> Any:
    return Annotated[int, Field(strict=True, ge=least, le=most)]


def _few_places(layers: list[Any]) -> list[Any]:
    numbers = [entry.layer for entry in layers]
    if numbers != sorted(set(numbers)) or sum(entry.heads for entry in layers) > MOST_PLACES:
        raise ValueError(f"must ascend, with {MOST_PLACES:,} KV heads at most")
    return layers


# a field is its type, with ... where it must be there
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Tokens, Some = _number(MOST_TOKENS), _number(MOST_TOKENS, 1)
Bool, Words, Size = Annotated[bool, Field(strict=True)], (Line | None, None), (Tokens | None, ...)
_table = partial(create_model, __config__=ConfigDict(extra="allow"))
Layer = _table(
    "Layer", layer=(_number(MOST_LAYERS - 1), ...), heads=(_number(MOST_HEADS - 1), ...), key_width=Size,
    value_width=Size, itemsize=Size, window=Size,
)  # fmt: skip
Model = _table(
    "Model", name=(Line, ...), architecture=Words, dtype=Words, query_heads=(Some, ...),
    layers=(Annotated[list[Layer], AfterValidator(_few_places)], ...),  # type: ignore[valid-type]
    weight_bytes=(Whole | None, ...), embedding_bytes=(Whole | None, ...),
)  # fmt: skip
Config = _table(
    "Config", sink=(Whole, ...), recent=(Whole, ...), recent_mode=(Line, ...), budget=(Whole, ...),
    dense_layers=(list[Whole], ...), trigger_delay=(Tokens, ...), trigger_policy=(Line, None),
    selector=(_table("Selector", lambda_clip=(Annotated[float, Field(ge=0, le=1)], ...)), ...),
    draft=(_table("Draft", max_tokens=(Some, ...)), None),
)  # fmt: skip
Audit = _table("Audit", every=(Some, ...), top=(Some, ...), layers=(list[Whole] | None, ...))
Prompt = _table(
    "Prompt", request=(Whole, ...), tokens=(Tokens, ...), sha256=(Line | None, ...), settings=(dict[str, Any], None)
)
Imported = _table(
    "Imported", file=(Line, ...), kind=(Literal["selections", "attention"], ...), masses=(Bool, ...),
    block_size=(Whole | None, ...),
)  # fmt: skip
SCHEMA = _table(
    "Manifest", schema_version=(_number(LARGEST, 1), ...), run_id=Words, created=(Line, ...),
    finished=(Line | None, ...), stopped=Words, ranks=(_number(1 << 12, 1), None),
    redacted=(Bool, ...), not_replayed=Words, spans=(Bool | None, None), audit=(Audit | None, ...), model=(Model, ...),
    policy=(Line, ...), preset=Words, lossless=(Bool | None, None), backend=Words, device=Words, config=(Config, ...),
    trigger_token_ids=(list[Whole], ...), prompts=(list[Prompt], ...),  # type: ignore[valid-type]
    versions=(dict[str, Line | None], ...),
    tables=(dict[str, Whole], None), imported=(Imported, None),
    unit=(Literal["request", "turn"], None),
)  # fmt: skip


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a trace's manifest; raises `TraceError` where there is none, or if it breaks the schema."""
    try:
        document = parse_json(read_file(folder / MANIFEST))
        version = document["schema_version"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceError(f"{folder} is not a trace: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"trace {folder} has an unreadable {MANIFEST}: {error}") from error
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(f"trace {folder} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi")
    try:
        return SCHEMA.model_validate(document).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise TraceError(f"trace {folder} has a {MANIFEST} {_fault(error)}") from error


def _fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]:
        return f"without {', '.join(missing)}"
    where = ".".join(map(str, faults[0]["loc"]))
    return f"that is damaged: {where}: {faults[0]['msg']}, got {shown(faults[0]['input'])}"


MOST_VALUES = 1 << 27  # of a column of a part: half a GB of int32
DAMAGED = (OSError, pa.ArrowException, ValueError, OverflowError, MemoryError)  # what Arrow raises for a damaged part
# columns that are never null, of the named table or of every one that has them
NEVER_NULL = {
    "request", "step", "head", "position", "slow", "sentence", "trigger", "attended_tokens", "context_tokens", "base",
    "accepted", "begin_us", "name", "stream", "rows", "kl_next_token", "argmax_agrees", "steps_since_slow",
    "read_ratio", "selections.layer", "recalls.layer", "supports.layer", "supports.positions", "steps.reason",
    "verifications.reason", "verifications.drafted", "timings.elapsed_us",
}  # fmt: skip
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
    if nulls and not NEVER_NULL.isdisjoint((name, f"{table}.{name}")):
        raise ValueError(f"{name} must have a value, got null")


def _check_range(table: str, name: str, min: int, max: int) -> None:  # noqa: A002 - as Arrow names them
    least, most = RANGES.get(f"{table}.{name}", RANGES.get(name, (-1, MOST_TOKENS)))
    if min < least or max > most:
        raise ValueError(f"{name} must be in {least} to {most:,}, got {min if min < least else max:,}")


def read_part(part: Path, table: str, columns: list[str] | None = None) -> pa.Table:
    """Read columns of a part, those that it lacks as nulls; raises one of `DAMAGED`."""
    open_part(part)
    return checked(parquet.read_table(part, columns=columns, schema=TABLES[table]), table)
