"""The folder of an evaluation: a manifest, and a line of JSON for each row, written as the row is made."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.machine.files import LOCK, FolderLock, atomic_file, write_atomically
from sfi_core.machine.text import first_line, parse_json, shown, write_json
from sfi_core.measure.evaluation.grid import Cell, key_of
from sfi_traces.record.folder import now, write_manifest
from sfi_traces.results.parquet import write_rows
from sfi_traces.results.summary import NAMES
from sfi_traces.schema import MANIFEST

Rows = Sequence[Mapping[str, Any]]

SCHEMA_VERSION = 1
KIND = "evaluation"
# what a resumed run compares or shows
NEEDED = (
    "schema_version", "asked", "methods", "text", "model", "device", "machine", "versions", "created",
    "finished", "stopped",
)  # fmt: skip
MAYBE = (int, float, type(None))
COMMON = {"policy": str, "preset": (str, type(None)), "settings": dict, "share": MAYBE, "error": (str, type(None))}
MEASURED = (  # a number, if there is a score
    "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps", "generated", "tokens_per_second",
)  # fmt: skip
# required columns with their types: those that identify a row, and those that the tables show
COLUMNS: dict[str, dict[str, Any]] = {
    "samples": {
        "method": str, "size": str, "task": str, "length": int, "seed": int, **COMMON, "score": MAYBE, "scores": dict,
        **dict.fromkeys(MEASURED, MAYBE),
    },
    "fidelity": {
        "method": str, "size": str, "length": int, "window": int, **COMMON, "tokens": MAYBE,
        "steps": (dict, type(None)), "report": (dict, type(None)),
    },
}  # fmt: skip
WHAT = "results folder"
TABLES = {"samples": "results", "fidelity": "fidelity"}  # table: its Parquet file

# types of columns that may hold only nulls; all others are floats
TEXT = ("method", "policy", "preset", "size", "task", "text", "finish_reason", "error")
INTEGERS = (
    "budget", "recent", "length", "seed", "prompt_tokens", "generated", "slow_steps", "fast_steps",
)  # fmt: skip
IDS = ("token_ids",)


class ResultsFolder:
    """An evaluation's results; each row is on disk before the next is made.

    The folder is locked for this process until `close` or `leave`.

    Attributes:
        manifest: The request, the model, the machine, and whether the run is complete.
        rows: The rows so far, by table.
        damaged: Faults of damaged lines, each with its file and line number.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: FolderLock | None) -> None:
        """Take a folder that `create` or `resume` has prepared and locked."""
        self.path, self.manifest, self._lock = path, manifest, lock
        self.rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self.damaged: list[str] = []

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, force: bool) -> Self:
        """Begin a folder; with `force` in place of an older evaluation.

        Raises `ConfigError` for a folder that exists while `force` is off, has other files, or is in use by another
        process; `SfiError` for one that cannot be written.
        """
        check_new(path, force=force)
        state = {"created": now(), "finished": None, "stopped": None}
        document = {"kind": KIND, "schema_version": SCHEMA_VERSION, **state, **manifest}
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path, WHAT)
            check_new(path, force=force)  # another process may have been faster
            for table, name in TABLES.items():
                for file in (_lines(path, table), path / f"{name}.parquet"):
                    file.unlink(missing_ok=True)
            write_manifest(path, document)
        return cls(path, document, lock)

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open a folder to show its rows; `begin` prepares it for more.

        Raises `InputError` for a folder without an evaluation or a file that cannot be read, `ConfigError` for a folder
        that another process uses.
        """
        _read_manifest(path)  # before a lock file is made in a folder that is none of ours
        try:
            lock = FolderLock(path, WHAT)
        except OSError:
            lock = None  # a folder that cannot be written needs no lock
        results = cls(path, _read_manifest(path), lock)
        for table in TABLES:
            results.rows[table], damaged = _read_lines(_lines(path, table), table)
            results.damaged += damaged
        return results

    def begin(self) -> None:
        """Remove rows with an error and damaged lines, which the resumed run makes again."""
        with _writing(self.path):
            for table, rows in self.rows.items():
                path = _lines(self.path, table)
                good = [row for row in rows if row["error"] is None]
                data = b"".join(map(_line, good))
                if path.exists() and path.read_bytes() != data:
                    write_atomically(path, data)
                self.rows[table] = good
            self.damaged = []

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add a row, and wait until it is on disk; raises `SfiError` if the folder cannot be written."""
        line = _line(row)
        with _writing(self.path), _lines(self.path, table).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.rows[table].append(json.loads(line))  # as a resumed run will read it

    def close(self, stopped: str | None = None, cells: Sequence[Cell] = ()) -> None:
        """Write the Parquet files, note in the manifest how the run ended, and unlock the folder.

        `stopped` says why the run ended early, None if it is complete; `cells` order the rows.
        Raises `SfiError` if the folder cannot be written.
        """
        with _writing(self.path):
            self.order(cells)
            self.manifest |= {"finished": None if stopped else now(), "stopped": stopped}
            for table, name in TABLES.items():
                if rows := _flat(table, self.rows[table]):
                    _write_table(self.path / f"{name}.parquet", rows, table, self.manifest)
            write_manifest(self.path, self.manifest)
        self.leave()

    def leave(self) -> None:
        """Unlock the folder, which can then only be read."""
        if self._lock is not None:
            self._lock.release()

    def order(self, cells: Sequence[Cell]) -> None:
        """Sort the rows, which a resumed run appends as it makes them, as their cells are."""
        for table in {cell.table for cell in cells}:
            rows = {key_of(row): row for row in self.rows[table]}
            self.rows[table] = [rows[cell.key] for cell in cells if cell.table == table and cell.key in rows]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SfiError(f"results {path} cannot be written: {error.strerror}") from error


def _lines(path: Path, table: str) -> Path:
    return path / f"{table}.jsonl"


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{write_json(row)}\n".encode()


def _flat(table: str, rows: Rows) -> Rows:
    """Return one row for each sample, or for each step of a window."""
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


def _write_table(path: Path, rows: Rows, table: str, manifest: Mapping[str, Any]) -> None:
    """Write rows that `_flat` returned, at least one; table name and manifest go into the file's metadata."""
    facts = {"table": table, "manifest": json.dumps(manifest, ensure_ascii=False)}
    try:
        with atomic_file(path) as temporary:
            write_rows(temporary, rows, facts, text=TEXT, integers=INTEGERS, ids=IDS)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InputError(f"results {path.parent} have a row of other types: {first_line(error)}") from error


def check_new(path: Path, *, force: bool) -> None:
    """Raise `ConfigError` for a folder with other files, or with an evaluation if `force` is off."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"results folder {path} must be a folder, got a file")
    if not path.exists() or all(file.name == LOCK for file in path.iterdir()):
        return
    try:
        document = parse_json((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigError(f"results folder {path} must be new or empty, got one with other files")
    if not force:
        raise ConfigError(f"results folder {path} exists; add --resume to go on with it, --force to replace it")


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of an evaluation; raises `InputError` for none, a damaged one or another version."""
    file = path / MANIFEST
    try:
        document = parse_json(file.read_bytes())
    except OSError:
        document = None
    except ValueError as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"results {file}{line}: not valid JSON; evaluate again") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"results folder {path} must hold an evaluation, got none to go on with")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"results folder {path} has schema {version}, this sfi reads {SCHEMA_VERSION}; evaluate again")
    for name in NEEDED:
        if name not in document:
            raise InputError(f"results {file} must have {name!r}, got none; evaluate again")
    return document


def _read_lines(path: Path, table: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the whole lines of a file; a torn last line is dropped, a missing file has none.

    Returns the rows, and for each damaged line its number and fault. Raises `InputError` if the file cannot
    be read.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InputError(f"results {path} cannot be read: {error.strerror}") from error
    rows, damaged = [], []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
            fault = _fault(row, table)
        except ValueError:
            fault = "not valid JSON"
        if fault is None:
            rows.append(row)
        else:
            damaged.append(f"results {path}, line {number}: {fault}")
    return rows, damaged


def _fault(row: Any, table: str) -> str | None:
    if not isinstance(row, dict):
        return f"no row of {table}"
    for name, kinds in COLUMNS[table].items():
        if name not in row:
            return f"no row of {table}, {name} is missing"
        if type(row[name]) not in (allowed := kinds if isinstance(kinds, tuple) else (kinds,)):
            names = " or ".join(kind.__name__ for kind in allowed).replace("NoneType", "null")
            return f"no row of {table}, {name} must be {names}, got {shown(row[name])}"
    score = row.get("score")
    if score is not None and (unknown := [name for name in MEASURED if row[name] is None]):
        return f"no row of {table}, {unknown[0]} must be a number where there is a score, got null"
    if score is not None and not (isinstance(score, int | float) and 0 <= score <= 1):
        return f"no row of {table}, score must be in [0, 1], got {shown(score)}"
    return None
