"""The answers of `sfi generate --batch -o FILE.jsonl`: a line each, written as it ends."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfi_cli.commands.generate.prompts import Line, Prompts, key
from sfi_core.errors import InputError
from sfi_core.machine.text import parse_json

SUFFIX = ".jsonl"


def unanswered(prompts: Prompts, path: Path) -> Prompts:
    """Return the lines that a file of answers lacks, by id or else by number; a torn last answer counts as none.

    Raises `InputError` for a file with other lines.
    """
    if not path.exists():
        return prompts
    answered = set()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and {"id", "line", "text"} <= row.keys()):
            raise InputError(f"{path}, line {number}: must be an answer of sfi generate; resume with another output")
        answered.add(key(row["id"], row["line"]))
    return Prompts.of_lines([line for line in prompts.lines if line.key not in answered])


def answer(line: Line, report: Any, text: str) -> dict[str, Any]:
    """Return the answer to a line: its id and number, the text, and what --json says of a request."""
    return {"id": line.id, "line": line.number, "text": text, **asdict(report)}
