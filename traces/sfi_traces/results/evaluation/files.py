"""The files of an evaluation's folder: its manifest, and a line of JSON for each row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.files import LOCK
from sfi_core.machine.text import parse_json, shown, write_json
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


def check_new(path: Path, *, force: bool) -> None:
    """Raise `ConfigError` for a folder with other files, or with an evaluation if `force` is off."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"results folder {path} must be a folder, got a file")
    if not path.exists() or all(one.name == LOCK for one in path.iterdir()):
        return
    try:
        document = parse_json((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigError(f"results folder {path} must be new or empty, got one with other files")
    if not force:
        raise ConfigError(f"results folder {path} exists; add --resume to go on with it, --force to replace it")


def read_manifest(path: Path) -> dict[str, Any]:
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
    found = document.get("schema_version")
    if found != SCHEMA_VERSION:
        raise InputError(f"results folder {path} has schema {found}, this sfi reads {SCHEMA_VERSION}; evaluate again")
    for name in NEEDED:
        if name not in document:
            raise InputError(f"results {file} must have {name!r}, got none; evaluate again")
    return document


def read_lines(path: Path, table: str) -> tuple[list[dict[str, Any]], list[str]]:
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


def write_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line."""
    return f"{write_json(row)}\n".encode()


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
