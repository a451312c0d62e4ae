"""A trace's folder: whether it may be recorded into, its manifest, and its part files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from sfi_core import __version__
from sfi_core.errors import ConfigError
from sfi_core.machine.files import LOCK, FolderLock, is_locked, write_atomically, writing
from sfi_core.machine.text import parse_json, write_json
from sfi_core.machine.versions import versions
from sfi_traces.overlap import Ints
from sfi_traces.schema import MANIFEST, PART, POSITIONS, SCHEMA_VERSION, TABLES

if TYPE_CHECKING:  # it comes with torch, which readers of a trace do not load
    from sfi_core.observers.events import RunEvent

# by the kind of a folder: what errors call it, and what to do where one is there
KINDS = {
    "trace": ("trace folder", "add --force to overwrite it"),
    "evaluation": ("results folder", "add --resume to go on with it, --force to replace it"),
}
OF_A_RANK = ("query_heads", "weight_bytes", "embedding_bytes")  # a rank's share of the model


def claim(folder: Path, kind: str = "trace", *, force: bool) -> FolderLock:
    """Make a folder of a kind, or check that it may be replaced, and lock it; what is in it stays.

    Raises `ConfigError` as `check_new`, or if another process writes it; `SfiError` if it cannot be made or written.
    """
    name, _ = KINDS[kind]
    with writing(f"{name} {folder}"):
        if not is_locked(folder):  # a trace that has just begun has no manifest yet
            check_new(folder, kind, force=force)  # before a lock file is made in a folder that is none of ours
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, name)
    check_new(folder, kind, force=force)  # another process may have been faster
    return lock


def check_new(folder: Path, kind: str, *, force: bool) -> None:
    """Raise `ConfigError` for a file, a folder with other files, or with one of the kind while `force` is off."""
    name, advice = KINDS[kind]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name} {folder} must be a folder, got a file")
    if not folder.exists() or all(file.name == LOCK for file in folder.iterdir()):
        return
    try:  # other programs have a manifest.json too
        document = parse_json((folder / MANIFEST).read_bytes())
        ours = "schema_version" in document and document.get("kind", "trace") == kind
    except (OSError, ValueError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise ConfigError(f"{name} {folder} must be new or empty, got one with other files")
    if not force:
        raise ConfigError(f"{name} {folder} exists; {advice}")


def clear(folder: Path) -> None:
    """Remove a trace's tables and manifest, and no other file."""
    for path in (folder / table for table in TABLES):
        if path.is_symlink():  # into a folder of somebody else's
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    (folder / MANIFEST).unlink(missing_ok=True)  # last: a half removed trace is still one


def describe_run(
    event: "RunEvent", provenance: Mapping[str, Any], *, positions: bool, redacted: bool
) -> dict[str, Any]:
    """Return the manifest of a run that begins; `provenance` has what only the caller knows, our keys win."""
    model, ranks = event.model, event.ranks  # with the heads and bytes of all ranks
    layers = [{**layer, "heads": ranks * layer["heads"]} for layer in model["layers"]]
    return {
        "preset": None,
        **provenance,
        "schema_version": SCHEMA_VERSION,
        "sfi_version": __version__,
        "created": now(),
        **{name: getattr(event, name) for name in ("run_id", "began_unix_ns", "ranks")},
        **dict.fromkeys(("finished", "stopped", "graphs", "not_replayed")),
        "redacted": redacted,
        "positions": positions,
        "audit": None if event.audit is None else dict(event.audit),
        "model": {**model, **{name: ranks * model[name] for name in OF_A_RANK if model.get(name)}, "layers": layers},
        **{name: getattr(event, name) for name in ("policy", "lossless", "backend", "device")},
        "config": dict(event.config),
        "trigger_token_ids": list(event.trigger_token_ids),
        "prompts": [],
        "versions": versions(),
    }


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_manifest(folder: Path, document: dict[str, Any]) -> None:
    """Write or replace a trace's manifest; an OSError leaves the old one."""
    write_atomically(folder / MANIFEST, f"{write_json(document, indent=2)}\n".encode())


ROW_BYTES = 512  # estimate for a row of Python values

Chunk = tuple[int, Mapping[str, Any]]  # number of rows, columns


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists: their values one after the other, and each list's size."""

    values: npt.NDArray[Any]
    sizes: Ints

    @classmethod
    def of(cls, values: npt.NDArray[Any], chosen: npt.NDArray[np.bool_]) -> Self:
        """Make a list of the chosen values of each row of [N, K]."""
        return cls(values[chosen], chosen.sum(1))

    @property
    def nbytes(self) -> int:
        """Bytes of values and sizes."""
        return self.values.nbytes + self.sizes.nbytes


class TableBuffer:
    """Collects rows, one by one or as columns, and gives them as a table of about `nbytes`."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Sequence[Any]] = []
        self._chunks: list[Chunk] = []
        self._tables: list[pa.Table] = []
        self.nbytes = 0

    def add_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows; their values are in the schema's order."""
        self._rows += rows
        self.nbytes += ROW_BYTES * len(rows)

    def add_columns(self, rows: int, columns: Mapping[str, Any]) -> None:
        """Add many rows; a column is an array (NaN is null), `Lists`, or one value for all rows."""
        self._chunks.append((rows, columns))
        self.nbytes += sum(getattr(column, "nbytes", 8) for column in columns.values())

    def add_table(self, rows: pa.Table) -> None:
        """Add rows that `take` of this buffer, or of another rank's, has given."""
        self._tables.append(rows)
        self.nbytes += rows.nbytes

    def take(self) -> pa.Table:
        """Return the waiting rows as a table, those of `add_table` first, and forget them."""
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(*pair) for pair in zip(columns, self._schema.types, strict=True)]
        else:
            arrays = [_joined(self._chunks, field.name, field.type) for field in self._schema]
        tables = [*self._tables, pa.Table.from_arrays(arrays, schema=self._schema)]
        self._rows, self._chunks, self._tables, self.nbytes = [], [], [], 0
        return pa.concat_tables(tables).combine_chunks() if len(tables) > 1 else tables[0]


def _joined(chunks: list[Chunk], name: str, kind: pa.DataType) -> pa.Array:
    columns = [column[name] for _, column in chunks]
    if columns and isinstance(columns[0], Lists):
        sizes = np.concatenate([column.sizes for column in columns])
        values = pa.array(np.concatenate([column.values for column in columns]), kind.value_type)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, values)
    arrays = [
        column if isinstance(column, np.ndarray) else np.full(rows, column)
        for (rows, _), column in zip(chunks, columns, strict=True)
    ]
    return pa.array(np.concatenate(arrays) if arrays else (), kind, from_pandas=True)


class PartFiles:
    """Writes the tables of a trace, part by part; `written` counts the rows of each table."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write to an existing folder; every file has what of the manifest does not change while the run goes on."""
        coming = ("finished", "stopped", "prompts", "graphs", "not_replayed")
        provenance = {key: value for key, value in manifest.items() if key not in coming}
        self._metadata = {"schema_version": str(SCHEMA_VERSION), "provenance": json.dumps(provenance)}
        self._folder = folder
        self._parts = dict.fromkeys(TABLES, 0)
        self.written = dict.fromkeys(TABLES, 0)

    def flush(self, tables: Mapping[str, TableBuffer]) -> None:
        """Write the waiting rows, `steps` last, so that a recorded step has its other rows too."""
        for name, buffer in sorted(tables.items(), key=lambda item: item[0] == "steps"):
            table = buffer.take()
            if len(table):
                self.write(name, table)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a table's next part; an OSError leaves the parts before as they were."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        sink = pa.BufferOutputStream()
        with parquet.ParquetWriter(
            sink,
            table.schema,
            compression="zstd",
            write_page_checksum=True,  # for `sfi trace check`
            use_dictionary=[field.name for field in table.schema if field.type == pa.string()],
            column_encoding=_encoding(table.schema),
            store_schema=False,  # types survive without it, and it can outweigh a small part
        ) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(self._metadata)
        write_atomically(folder / PART.format(self._parts[name]), sink.getvalue())
        self._parts[name] += 1
        self.written[name] += len(table)


def _encoding(schema: pa.Schema) -> dict[str, str]:
    # integers and positions mostly grow; masses differ least in their exponents
    encoding = {}
    for field in schema:
        if pa.types.is_integer(field.type):
            encoding[field.name] = "DELTA_BINARY_PACKED"
        elif field.type == POSITIONS:
            encoding[f"{field.name}.list.element"] = "DELTA_BINARY_PACKED"
        elif pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
            encoding[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
    return encoding
