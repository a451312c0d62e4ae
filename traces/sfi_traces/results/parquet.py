"""Rows of results as a Parquet file: a benchmark's, a kernel benchmark's, an evaluation's."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

BENCH_VERSION = KERNEL_VERSION = 1  # of the files' schemas


def write_bench(document: dict[str, Any], path: Path) -> None:
    """Write a decoding benchmark's rows as one table; its other entries go into the file's metadata."""
    facts = {key: value for key, value in document.items() if key != "rows"}
    metadata = {"schema_version": str(BENCH_VERSION), "bench": json.dumps(facts)}
    write_rows(path, document["rows"], metadata, text=("not_replayed", "acceptance"), lists=("repeat_rates",))


def write_kernel_bench(document: dict[str, Any], path: Path) -> None:
    """Write a kernel benchmark's rows as one table; machine, versions and notes go into the file's metadata."""
    facts = {key: document[key] for key in ("backend", "interrupted", "notes", "machine", "versions")}
    metadata = {"schema_version": str(KERNEL_VERSION), "kernel_bench": json.dumps(facts)}
    write_rows(path, document["rows"], metadata, text=("form", "failure"))


def write_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, str],
    *,
    text: Collection[str] = (),
    integers: Collection[str] = (),
    lists: Collection[str] = (),
    ids: Collection[str] = (),
) -> None:
    """Write at least one row as one table; dicts within a row, such as `settings`, become JSON.

    A column of nulls does not show its type. It has the type named here (`text`, `integers`, `lists` of
    floats, `ids`: lists of token ids), else float, so that the files of different runs can be read together.
    """
    named = {
        **dict.fromkeys(text, pa.string()),
        **dict.fromkeys(integers, pa.int64()),
        **dict.fromkeys(lists, pa.list_(pa.float64())),
        **dict.fromkeys(ids, pa.list_(pa.int32())),
    }
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_plain(row.get(name)) for row in rows] for name in names}
    schema = pa.schema([pa.field(name, named.get(name) or _type(values)) for name, values in columns.items()])
    table = pa.table(columns, schema=schema.with_metadata(metadata))
    parquet.write_table(table, path, compression="zstd")


def _plain(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _type(values: list[Any]) -> Any:
    kind = pa.array(values).type
    return pa.float64() if pa.types.is_null(kind) else kind
