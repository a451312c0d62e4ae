"""Rows of an evaluation as a Parquet file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from sfi_traces.results.evaluation.summary import NAMES, summarize_harness

Row = Mapping[str, Any]

# columns whose type a table of few rows may not show; the others are floats
TEXT = (
    "method", "policy", "preset", "size", "task", "text", "finish_reason", "error", "metric",
)  # fmt: skip
INTEGERS = (
    "budget", "recent", "length", "seed", "prompt_tokens", "generated", "slow_steps", "fast_steps", "samples",
)  # fmt: skip


def flat(table: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return what a file has a row for: a sample, a step of a window, a metric of a harness task."""
    if table == "harness":
        return summarize_harness(rows)
    if table == "samples":
        return rows
    return [
        {
            **{name: row[name] for name in (*NAMES, "length")},
            "window": row["window"],
            **{name: values[step] for name, values in row["steps"].items() if name != "window"},
        }
        for row in rows
        if row["steps"] is not None
        for step in range(len(row["steps"]["step"]))
    ]


def parquet_bytes(rows: Sequence[Row], table: str, manifest: Row) -> bytes:
    """Make a file of rows; tables within a row, such as `settings`, become JSON.

    Args:
        rows: At least one, as `flat` gives them.
        table: Its name, for the file's metadata.
        manifest: What was asked, for the file's metadata.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_plain(row.get(name)) for row in rows] for name in names}
    schema = pa.schema([pa.field(name, _type(name, columns[name])) for name in names])
    facts = {"table": table, "manifest": json.dumps(manifest, ensure_ascii=False)}
    sink = pa.BufferOutputStream()
    parquet.write_table(
        pa.table(columns, schema=schema.with_metadata(facts)), sink, compression="zstd"
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _plain(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _type(name: str, values: list[Any]) -> Any:
    if name in TEXT:
        return pa.string()
    if name in INTEGERS:
        return pa.int64()
    found = pa.array(values).type
    return pa.float64() if pa.types.is_null(found) else found
