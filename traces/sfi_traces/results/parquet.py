"""Rows of an evaluation's results as a Parquet file."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


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
