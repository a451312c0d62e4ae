"""The folder of an evaluation: a manifest, and a line of JSON for each result as soon as it is there."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_traces.atomic_file import write_atomically
from sfi_traces.record.manifest import now, write_manifest
from sfi_traces.results.evaluation.parquet_file import flat, write_table
from sfi_traces.schema import MANIFEST

SCHEMA_VERSION = 1
KIND = "evaluation"
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
        rows: The rows so far, by table.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], rows: dict[str, list[dict[str, Any]]]
    ) -> None:
        """Take a folder that is ready to be written; see `create` and `resume`."""
        self.path, self.manifest, self.rows = path, manifest, rows

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, force: bool) -> Self:
        """Begin a folder; with `force` in the place of an older evaluation.

        Raises:
            ConfigError: It is there and `force` is off, or holds something else.
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
        try:
            path.mkdir(parents=True, exist_ok=True)
            for table, name in TABLES.items():
                for file in (_lines(path, table), path / f"{name}.parquet"):
                    file.unlink(missing_ok=True)
            write_manifest(path, document)
        except OSError as error:
            raise SfiError(f"results folder {path} cannot be written: {error.strerror}") from error
        return cls(path, document, {table: [] for table in TABLES})

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open a folder to go on with it; a last line that a crash has torn is cut off.

        Raises:
            InputError: It holds no evaluation, or a line of it is damaged.
        """
        manifest = read_manifest(path)
        return cls(path, manifest, {table: _read(_lines(path, table)) for table in TABLES})

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add a row, and wait until the disk has it.

        Raises:
            SfiError: The disk is full, say.
        """
        line = _line(row)
        with self._writing(), _lines(self.path, table).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows[table].append(json.loads(line))  # as a resumed run will read it

    def forget_failures(self) -> None:
        """Remove the rows that have an error, which are to be tried again.

        Raises:
            SfiError: The disk is full, say; the rows stay.
        """
        for table, rows in self.rows.items():
            kept = [row for row in rows if row["error"] is None]
            if len(kept) < len(rows):
                with self._writing():
                    data = "".join(map(_line, kept)).encode()
                    write_atomically(_lines(self.path, table), data)
                self.rows[table] = kept

    def close(self, stopped: str | None = None) -> None:
        """Write the Parquet files, and say in the manifest how the run ended.

        Args:
            stopped: Why it ended early; None when it is complete.

        Raises:
            SfiError: The disk is full, say.
        """
        self.manifest |= {"finished": None if stopped else now(), "stopped": stopped}
        with self._writing():
            for table, name in TABLES.items():
                if rows := flat(table, self.rows[table]):
                    write_table(self.path / f"{name}.parquet", rows, table, self.manifest)
            write_manifest(self.path, self.manifest)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SfiError(f"results {self.path} cannot be written: {error.strerror}") from error


def check_new(path: Path, *, force: bool) -> None:
    """Refuse a folder that cannot take a new evaluation.

    Raises:
        ConfigError: It holds an evaluation and `force` is off, or something else.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"results folder {path} must be a folder, got a file")
    if not path.exists() or not any(path.iterdir()):
        return
    if not _is_evaluation(_document(path)):
        raise ConfigError(f"results folder {path} must be new or empty, got one with other files")
    if not force:
        raise ConfigError(
            f"results folder {path} exists; add --resume to go on with it, --force to replace it"
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what an evaluation was asked.

    Raises:
        InputError: The folder holds none, or one of another version.
    """
    document = _document(path)
    if not isinstance(document, dict) or not _is_evaluation(document):
        raise InputError(f"results folder {path} must hold an evaluation, got none to go on with")
    if document["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"results folder {path} has schema {document['schema_version']}, this sfi reads "
            f"{SCHEMA_VERSION}; evaluate again"
        )
    return document


def _document(path: Path) -> Any:
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_evaluation(document: Any) -> bool:
    return isinstance(document, dict) and document.get("kind") == KIND


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _lines(path: Path, table: str) -> Path:
    return path / f"{table}.jsonl"


def _read(path: Path) -> list[dict[str, Any]]:
    # whole lines only; what follows the last one is cut, so that the next row starts a line
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
    except OSError as error:
        raise InputError(f"results {path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"results {path}, line {number}: not valid JSON") from error
    return rows
