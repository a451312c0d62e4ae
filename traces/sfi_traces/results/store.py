"""The folder of an evaluation: a manifest, and a line of JSON for each row, written as the row is made."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import InputError
from sfi_core.machine.files import FolderLock, write_atomically, writing
from sfi_core.machine.text import parse_json, shown, write_json
from sfi_core.measure.evaluation.grid import Cell, key_of
from sfi_traces.record.folder import KINDS, claim, now, write_manifest
from sfi_traces.schema import MANIFEST

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


class ResultsFolder:
    """An evaluation's rows by table, each on disk before the next is made; locked until `close` or `leave`.

    `manifest` is the request, model and machine, and whether the run is complete; `damaged` are faults of lines.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: FolderLock | None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self.rows: dict[str, list[dict[str, Any]]] = {table: [] for table in COLUMNS}
        self.damaged: list[str] = []

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, force: bool) -> Self:
        """Begin a folder; with `force` in place of an older evaluation. Raises as `claim` does."""
        lock = claim(path, KIND, force=force)
        state = {"created": now(), "finished": None, "stopped": None}
        document = {"kind": KIND, "schema_version": SCHEMA_VERSION, **state, **manifest}
        with writing(f"results {path}"):
            for table in COLUMNS:
                _lines(path, table).unlink(missing_ok=True)
            write_manifest(path, document)
        return cls(path, document, lock)

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open a folder to show its rows; raise `InputError` if it has none, `ConfigError` if it is in use."""
        _read_manifest(path)  # before a lock file is made in a folder that is none of ours
        try:
            lock = FolderLock(path, KINDS[KIND][0])
        except OSError:
            lock = None  # a folder that cannot be written needs no lock
        results = cls(path, _read_manifest(path), lock)
        for table in COLUMNS:
            results.rows[table], damaged = _read_lines(_lines(path, table), table)
            results.damaged += damaged
        return results

    def begin(self) -> None:
        """Remove rows with an error and damaged lines, which the resumed run makes again."""
        with writing(f"results {self.path}"):
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
        with writing(f"results {self.path}"), _lines(self.path, table).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.rows[table].append(json.loads(line))  # as a resumed run will read it

    def close(self, stopped: str | None = None, cells: Sequence[Cell] = ()) -> None:
        """Order the rows as `cells`, note why the run ended early, if it did, and unlock the folder."""
        try:
            with writing(f"results {self.path}"):
                self.order(cells)
                self.manifest |= {"finished": None if stopped else now(), "stopped": stopped}
                write_manifest(self.path, self.manifest)
        finally:
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


def _lines(path: Path, table: str) -> Path:
    return path / f"{table}.jsonl"


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{write_json(row)}\n".encode()


def _read_manifest(path: Path) -> dict[str, Any]:
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
    """Return the rows of a file's whole lines, and the fault of each damaged one; a torn last line is dropped."""
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
        if fault is not None:
            damaged.append(f"results {path}, line {number}: {fault}")
        else:
            rows.append(row)
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
