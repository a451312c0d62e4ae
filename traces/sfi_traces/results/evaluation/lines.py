"""Reads and writes the lines of a results file, a JSON object for each row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfi_core.errors import InputError
from sfi_core.machine.text import parse_json, shown, write_json

MAYBE = (int, float, type(None))
COMMON = {"policy": str, "preset": (str, type(None)), "settings": dict, "share": MAYBE, "error": (str, type(None))}
MEASURED = (  # a number, if there is a score
    "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps", "generated", "tokens_per_second",
)  # fmt: skip
# required columns with their types: those that identify a row, and those that the tables show
NEEDED: dict[str, dict[str, Any]] = {
    "samples": {
        "method": str, "size": str, "task": str, "length": int, "seed": int, **COMMON, "score": MAYBE, "scores": dict,
        **dict.fromkeys(MEASURED, MAYBE),
    },
    "fidelity": {
        "method": str, "size": str, "length": int, "window": int, **COMMON, "tokens": MAYBE,
        "steps": (dict, type(None)), "report": (dict, type(None)),
    },
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
    for name, kinds in NEEDED[table].items():
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
