"""Folders of traces: which may be recorded into, how an old trace is removed, where each rank writes."""

import json
import os
import re
import shutil
from pathlib import Path

from sfi_core.errors import ConfigError, SfiError
from sfi_traces.schema import MANIFEST, RANK, TABLES


def claim(folder: Path, *, force: bool) -> None:
    """Make the folder, or check that it may be recorded into; an old trace stays until `clear`.

    Raises:
        ConfigError: The folder holds a trace and `force` is off, or other files.
        SfiError: The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
        writable = os.access(folder, os.W_OK)
    except FileExistsError as error:
        raise ConfigError(f"trace folder {folder} must be a folder, got a file") from error
    except OSError as error:
        raise SfiError(f"trace folder {folder} cannot be made: {error.strerror}") from error
    if not writable:
        raise SfiError(f"trace folder {folder} cannot be written: permission denied")
    if empty:
        return
    if not _is_trace(folder):
        raise ConfigError(f"trace folder {folder} must be new or empty, got one with other files")
    if not force:
        raise ConfigError(f"trace folder {folder} exists; add --force to overwrite it")


def clear(folder: Path, ranks: int = 1) -> None:
    """Remove a trace's tables and manifest, and no other file.

    Each of the next run's `ranks` clears its own folder. Those of further ranks, which an earlier run left,
    are cleared here and removed if empty.
    """
    for rank, path in rank_folders(folder).items():
        if rank >= ranks and (path / MANIFEST).exists():
            clear(path)
            if not any(path.iterdir()):
                path.rmdir()
    for table in TABLES:
        if (folder / table).exists():
            shutil.rmtree(folder / table)
    (folder / MANIFEST).unlink(missing_ok=True)  # last: a half removed trace is still one


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes: rank 0 to the trace's folder, every other to a folder inside it."""
    return folder / RANK.format(number=rank) if rank else folder


def rank_folders(folder: Path) -> dict[int, Path]:
    """Find the folders of ranks 1 and up, by rank; each may or may not hold a trace."""
    named = ((re.fullmatch(r"rank-(\d{5,})", path.name), path) for path in folder.glob("rank-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def _is_trace(folder: Path) -> bool:
    # other programs have a manifest.json too
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema_version" in document
