"""The folder of an evaluation: a manifest, and a line of JSON for each result as soon as it is there.

Several processes may work on one folder. Who writes or reads a file has the folder's lock for that long; a
sample that a process has claimed is no other process's until the row is written or the process has ended.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError, SfiError
from sfi_core.measure.evaluation.grid import Grid, Key
from sfi_traces.atomic_file import write_atomically
from sfi_traces.record.manifest import now, write_manifest
from sfi_traces.results.evaluation.evaluation_manifest import (
    KIND,
    SCHEMA_VERSION,
    check_new,
    read_manifest,
)
from sfi_traces.results.evaluation.folder_lock import FolderLock
from sfi_traces.results.evaluation.lines import read_lines, write_line
from sfi_traces.results.evaluation.parquet_file import flat, write_table

TABLES = {
    "samples": "results",
    "fidelity": "fidelity",
    "harness": "harness",
}  # table: its Parquet file


class ResultsFolder:
    """An evaluation's results; each row is on the disk before the next one is made.

    Attributes:
        path: The folder.
        manifest: The request, the model, the machine, and whether the run is complete.
        rows: The rows so far, by table; other processes' as of the last look at the files.
        damaged: What is wrong with lines that hold no row, each with its file and number.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: FolderLock) -> None:
        """Take a folder that is ready to be written; see `create` and `resume`."""
        self.path, self.manifest, self._lock = path, manifest, lock
        self.rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self.damaged: list[str] = []
        self._seen: dict[str, tuple[int, int] | None] = dict.fromkeys(TABLES)

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, force: bool) -> Self:
        """Begin a folder; with `force` in the place of an older evaluation.

        Raises:
            ConfigError: It is there and `force` is off, holds something else, or is another process's.
            SfiError: It cannot be written.
        """
        check_new(path, force=force)
        document = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "created": now(),
            "finished": None,
            "stopped": None,
            **manifest,
        }
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path)
            with lock.writing():
                check_new(path, force=force)  # another process may have been faster
                if not lock.alone():
                    raise ConfigError(
                        f"results folder {path} must be free to be replaced, got another process on it"
                    )
                for table, name in TABLES.items():
                    for file in (_lines(path, table), path / f"{name}.parquet"):
                        file.unlink(missing_ok=True)
                write_manifest(path, document)
                lock.join()
        return cls(path, document, lock)

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open a folder to show it or to go on with it, and take part; `begin` goes on, `leave` does not.

        Raises:
            InputError: It holds no evaluation, or a file of it cannot be read.
        """
        read_manifest(path)  # leaves no lock in a folder of something else
        lock = FolderLock(path)
        with lock.writing():
            lock.join()  # nobody replaces the folder from here on
            results = cls(path, read_manifest(path), lock)
            results._read()
        return results

    def begin(self) -> None:
        """Remove what is to be made again: rows that have an error, damaged lines.

        Raises:
            SfiError: The disk is full, say; the rows stay.
        """
        with _writing(self.path), self._lock.writing():
            self._read()
            for table, rows in self.rows.items():
                path = _lines(self.path, table)
                kept = [row for row in rows if row["error"] is None]
                data = b"".join(map(write_line, kept))
                if path.exists() and path.read_bytes() != data:
                    write_atomically(path, data)
                    self.rows[table] = kept
                self._seen[table] = _state(path)
            self.damaged = []

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add a row, and wait until the disk has it.

        Raises:
            SfiError: The disk is full, say.
        """
        line, path = write_line(row), _lines(self.path, table)
        with _writing(self.path), self._lock.writing():
            known = _state(path) == self._seen[table]
            _cut_torn_end(path)
            with path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if known:
                self._seen[table] = _state(path)
        self.rows[table].append(json.loads(line))  # as a resumed run will read it

    def shared(self, part: Grid) -> "Shared":
        """Return which rows of a part are there, and the means to claim others."""
        return Shared(self, part)

    def close(self, stopped: str | None = None, parts: Sequence[Grid] = ()) -> int:
        """Write the Parquet files of all rows that are there, and say in the manifest how the run ended.

        Args:
            stopped: Why it ended early; None when this process has nothing left to do.
            parts: Their keys say the order of the rows, and what is missing.

        Returns:
            The rows that are still missing: another process has claimed them.

        Raises:
            SfiError: The disk is full, say.
        """
        with _writing(self.path), self._lock.writing():
            self._read()
            missing = self.order(parts)
            if missing and stopped is None:
                stopped = f"{missing} rows left to other processes"
            self.manifest |= {"finished": None if stopped else now(), "stopped": stopped}
            for table, name in TABLES.items():
                if rows := flat(table, self.rows[table]):
                    write_table(self.path / f"{name}.parquet", rows, table, self.manifest)
            write_manifest(self.path, self.manifest)
        self.leave()
        return missing

    def leave(self) -> None:
        """Give all claims up; the folder can be read from here on, not written."""
        self._lock.close()

    def order(self, parts: Sequence[Grid]) -> int:
        """Put the rows into the order in which one process makes them, each key once; a score wins.

        Returns:
            The rows that are missing.
        """
        missing = 0
        for part in parts:
            found: dict[Key, dict[str, Any]] = {}
            for row in self.rows[part.table]:
                key = part.key(row)
                if key not in found or found[key]["error"] is not None:
                    found[key] = row
            keys = part.keys
            self.rows[part.table] = [found[key] for key in keys if key in found]
            missing += len(keys) - len(self.rows[part.table])
        return missing

    def refresh(self, table: str) -> None:
        """Read a table's rows anew where another process has written some.

        Raises:
            InputError: The file cannot be read.
        """
        with self._lock.writing():
            if _state(_lines(self.path, table)) != self._seen[table]:
                self._read_table(table)

    def take(self, table: str, unit: int) -> bool:
        """Claim a unit of a table; False where another process has claimed it."""
        return self._lock.take(_claim(table, unit))

    def give_back(self, table: str, unit: int) -> None:
        """Give a claim up."""
        self._lock.give_back(_claim(table, unit))

    def _read(self) -> None:
        self.damaged = []
        for table in TABLES:
            self.damaged += self._read_table(table)

    def _read_table(self, table: str) -> list[str]:
        path = _lines(self.path, table)
        self.rows[table], damaged = read_lines(path, table)
        self._seen[table] = _state(path)
        return damaged


class Shared:
    """The rows of a part that are there, whoever made them, and the claims of this process.

    It is the `done` and the `claims` of a grid's `run`.
    """

    def __init__(self, results: ResultsFolder, part: Grid) -> None:
        """Begin with the rows that the folder knows."""
        self._results, self._part = results, part
        self._learn()

    def __contains__(self, key: object) -> bool:
        """Say whether there is a row of this key."""
        return key in self._keys

    def take(self, unit: int) -> bool:
        """Claim a unit, and read what others have written; False where another process has the unit."""
        table = self._part.table
        if not self._results.take(table, unit):
            return False
        self._results.refresh(table)
        self._learn()
        return True

    def give_back(self, unit: int) -> None:
        """Give a claim up."""
        self._results.give_back(self._part.table, unit)

    def _learn(self) -> None:
        part = self._part
        self._keys = {part.key(row) for row in self._results.rows[part.table]}


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SfiError(f"results {path} cannot be written: {error.strerror}") from error


def _claim(table: str, unit: int) -> int:
    return unit * len(TABLES) + list(TABLES).index(table)


def _lines(path: Path, table: str) -> Path:
    return path / f"{table}.jsonl"


def _state(path: Path) -> tuple[int, int] | None:
    # changes with everything that another process writes: a file grows, or is another one
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size


def _cut_torn_end(path: Path) -> None:
    # what a killed process has left of a line must not become part of the next
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
