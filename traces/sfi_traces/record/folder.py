"""Folders of traces: which may be recorded into, how an old trace is removed, where each rank writes."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from sfi_core.errors import ConfigError, SfiError
from sfi_core.machine.files import LOCK, FolderLock, is_locked
from sfi_core.machine.text import parse_json
from sfi_traces.schema import MANIFEST, RANK, TABLES


def claim(folder: Path, *, force: bool) -> FolderLock:
    """Make the folder, or check that it may be recorded into, and lock it; an old trace stays until `clear`.

    Raises:
        ConfigError: The folder holds a trace and `force` is off, or other files, or another process writes it.
        SfiError: The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_locked(folder):  # a trace that has just begun has no manifest yet
            _check(folder, force=force)  # before a lock file is made in a folder that is none of ours
        lock = FolderLock(folder, "trace folder")
    except FileExistsError as error:
        raise ConfigError(f"trace folder {folder} must be a folder, got a file") from error
    except OSError as error:
        raise SfiError(f"trace folder {folder} cannot be written: {error.strerror}") from error
    _check(folder, force=force)  # another process may have been faster
    return lock


def _check(folder: Path, *, force: bool) -> None:
    if all(one.name == LOCK for one in folder.iterdir()):
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
            with suppress(OSError):  # not empty
                path.rmdir()
    for path in (folder / table for table in TABLES):
        if path.is_symlink():  # into a folder of somebody else's
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    (folder / MANIFEST).unlink(missing_ok=True)  # last: a half removed trace is still one


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes: rank 0 to the trace's folder, every other to a folder inside it."""
    return folder / RANK.format(number=rank) if rank else folder


def rank_folders(folder: Path) -> dict[int, Path]:
    """Find the folders of ranks 1 and up, by rank, without links; each may or may not hold a trace."""
    found = (path for path in folder.glob("rank-*") if not path.is_symlink())
    named = ((re.fullmatch(r"rank-(\d{5,9})", path.name), path) for path in found)
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def _is_trace(folder: Path) -> bool:
    # other programs have a manifest.json too
    try:
        document = parse_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema_version" in document
