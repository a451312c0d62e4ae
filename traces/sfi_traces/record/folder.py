"""A trace's folder: whether it may be recorded into, and its manifest."""

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfi_core import __version__
from sfi_core.errors import ConfigError, SfiError
from sfi_core.machine.files import LOCK, FolderLock, is_locked, write_atomically
from sfi_core.machine.text import parse_json, write_json
from sfi_core.machine.versions import versions
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES

if TYPE_CHECKING:  # it comes with torch, which readers of a trace do not load
    from sfi_core.observers.events import RunEvent

OF_A_RANK = ("query_heads", "weight_bytes", "embedding_bytes")  # a rank's share of the model


def claim(folder: Path, *, force: bool) -> FolderLock:
    """Make the folder, or check that it may be recorded into, and lock it; an old trace stays until `clear`.

    Raises `ConfigError` for a folder with a trace while `force` is off, with other files, or that another process
    writes; `SfiError` for one that cannot be made or written.
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


def clear(folder: Path) -> None:
    """Remove a trace's tables and manifest, and no other file."""
    for path in (folder / table for table in TABLES):
        if path.is_symlink():  # into a folder of somebody else's
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    (folder / MANIFEST).unlink(missing_ok=True)  # last: a half removed trace is still one


def _is_trace(folder: Path) -> bool:
    # other programs have a manifest.json too
    try:
        document = parse_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema_version" in document


def describe_run(
    event: "RunEvent", provenance: Mapping[str, Any], *, positions: bool, redacted: bool
) -> dict[str, Any]:
    """Return the manifest of a run that begins; `provenance` has what only the caller knows, our keys win."""
    return {
        "preset": None,
        **provenance,
        "schema_version": SCHEMA_VERSION,
        "sfi_version": __version__,
        "created": now(),
        **{name: getattr(event, name) for name in ("run_id", "began_unix_ns", "ranks")},
        **dict.fromkeys(("finished", "stopped", "graphs", "not_replayed")),
        "redacted": redacted,
        "positions": positions,
        "audit": None if event.audit is None else dict(event.audit),
        "model": _whole_model(event),
        **{name: getattr(event, name) for name in ("policy", "lossless", "backend", "device")},
        "config": dict(event.config),
        "trigger_token_ids": list(event.trigger_token_ids),
        "prompts": [],
        "versions": versions(),
    }


def _whole_model(event: "RunEvent") -> dict[str, Any]:
    # with the heads and bytes of all ranks
    model, ranks = event.model, event.ranks
    layers = [{**layer, "heads": ranks * layer["heads"]} for layer in model["layers"]]
    return {**model, **{name: ranks * model[name] for name in OF_A_RANK if model.get(name)}, "layers": layers}


def file_metadata(document: dict[str, Any]) -> dict[str, str]:
    """Return each part file's metadata: the manifest without what changes while the run goes on."""
    coming = ("finished", "stopped", "prompts", "graphs", "not_replayed")
    provenance = {key: value for key, value in document.items() if key not in coming}
    return {"schema_version": str(SCHEMA_VERSION), "provenance": json.dumps(provenance)}


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_manifest(folder: Path, document: dict[str, Any]) -> None:
    """Write or replace a trace's manifest; an OSError leaves the old one."""
    write_atomically(folder / MANIFEST, f"{write_json(document, indent=2)}\n".encode())
