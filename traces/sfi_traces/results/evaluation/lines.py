"""Reads and writes the lines of a results file, a JSON object for each row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfi_core.errors import InputError
from sfi_core.machine.text import parse_json, shown, write_json

# required columns: those that identify a row, with their types, and those that the tables show
KEYS: dict[str, dict[str, type]] = {
    "samples": {"method": str, "size": str, "task": str, "length": int, "seed": int},
    "fidelity": {"method": str, "size": str, "length": int, "window": int},
}
COMMON = ("policy", "preset", "settings", "share", "error")
NEEDED: dict[str, tuple[str, ...]] = {
    "samples": (
        *COMMON, "score", "scores", "read_ratio", "selection_ratio", "stored_ratio", "slow_steps",
        "fast_steps", "generated", "tokens_per_second",
    ),
    "fidelity": (*COMMON, "tokens", "steps", "report"),
}  # fmt: skip


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
    missing = [name for name in (*KEYS[table], *NEEDED[table]) if name not in row]
    if missing:
        return f"no row of {table}, {missing[0]} is missing"
    for name, kind in KEYS[table].items():
        if type(row[name]) is not kind:
            return f"no row of {table}, {name} must be {kind.__name__}, got {shown(row[name])}"
    score = row.get("score")
    if score is not None and not (isinstance(score, int | float) and 0 <= score <= 1):
        return f"no row of {table}, score must be in [0, 1], got {shown(score)}"
    return None
