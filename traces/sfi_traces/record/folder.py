"""The folder of a trace to be recorded: which one may be taken, and how an old trace makes room."""

import json
import os
import shutil
from pathlib import Path

from sfi_core.errors import ConfigError, SfiError
from sfi_traces.record.rank_folders import rank_folders
from sfi_traces.schema import MANIFEST, TABLES


def claim(folder: Path, *, force: bool) -> None:
    """Make the folder, or see that it may be taken; an old trace in it stays until `clear`.

    Raises:
        ConfigError: It holds a trace and `force` is off, or something else.
        SfiError: It cannot be made or written.
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
    """Remove a trace's tables and manifest, and nothing else that may lie beside them.

    Args:
        folder: The trace's.
        ranks: Those of the run that comes. Each clears its own folder; those beyond are cleared here,
            and removed where nothing else is in them.
    """
    for rank, path in rank_folders(folder).items():
        if rank >= ranks and (path / MANIFEST).exists():
            clear(path)
            if not any(path.iterdir()):
                path.rmdir()
    for table in TABLES:
        if (folder / table).exists():
            shutil.rmtree(folder / table)
    (folder / MANIFEST).unlink(
        missing_ok=True
    )  # last: what is half removed is still known as a trace


def _is_trace(folder: Path) -> bool:
    # other programs have a manifest.json too
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema_version" in document
