"""Results as JSON lines, a file a part, which several processes append to and any run can resume."""

import json
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sfi_core.errors import InputError
from sfi_core.machine.memory import describe
from sfi_core.machine.versions import versions
from sfi_core.models.source import model_digest

RESULTS = Path(__file__).parents[1] / "results" / "evidence"
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of a part.

    Attributes:
        path: The file. A line with `at` describes a run: commit, versions, machine, model, texts.
            Every other line is a row, and names its run.
        columns: The names of what tells rows apart.
        run: The run that new rows name.
    """

    path: Path
    columns: Sequence[str]
    run: str = ""

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return what tells a row from others."""
        return tuple(row[name] for name in self.columns)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, the first of each key.

        Raises:
            InputError: A line is no JSON.
        """
        seen: set[Key] = set()
        texts: dict[str, dict[str, str]] = {}
        for row in read_lines(self.path):
            if "at" in row:
                texts[row["run"]] = row.get("texts", {})
                continue
            if "kind" in row and "text" not in row:  # an early row: its run says it
                row["text"] = texts[row["run"]][f"{row['kind']}/{row['half']}"]
            if (key := self.key(row)) not in seen:
                seen.add(key)
                yield row

    def done(self) -> set[Key]:
        """Return the keys that have a row."""
        return {self.key(row) for row in self.rows()}

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row in one write, so that lines of several processes do not mix."""
        append(self.path, {"run": self.run, **row})


def begin(path: Path, columns: Sequence[str], about: Mapping[str, Any]) -> Records:
    """Return the records of a file, with a run of `about` described in it once."""
    text = json.dumps(about, sort_keys=True)
    run = sha256(text.encode()).hexdigest()[:8]
    if run not in {row["run"] for row in read_lines(path) if "at" in row}:
        append(path, {"run": run, "at": "run", **about})
    return Records(path, columns, run)


def about_run(model: Any, name: str) -> dict[str, Any]:
    """Describe what a run's numbers depend on."""
    machine = describe()
    return {
        "model": name,
        "model_digest": model_digest(model)[:12],
        "dtype": str(model.dtype).removeprefix("torch."),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions(),
        "processor": machine["processor"],
        "threads": machine["threads"],
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line; on a local file system one write of an appending file is not torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; none where there is no file.

    Raises:
        InputError: A line is no JSON.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number} must be JSON, got {line[:40]!r}") from error


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """Round to significant digits; below 1e-7 to 0."""
    return [short(value, digits) for value in values]


def short(value: float, digits: int = 5) -> float:
    """Round a number to significant digits; below 1e-7 to 0."""
    if not math.isfinite(value) or abs(value) < 1e-7:  # noqa: PLR2004 - said above
        return 0.0 if math.isfinite(value) else value
    return float(f"{value:.{digits}g}")


def plain(value: Any) -> Any:
    """Return nested values as JSON has them: 4 significant digits, null for what is not a number."""
    if isinstance(value, float):
        return short(value, 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()  # noqa: S603
