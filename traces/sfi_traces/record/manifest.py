"""The manifest of a trace that is being recorded."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sfi_core import __version__
from sfi_core.machine.files import write_atomically
from sfi_core.machine.text import write_json
from sfi_core.machine.versions import versions
from sfi_core.observers.events import RunEvent
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION


def describe_run(event: RunEvent, provenance: Mapping[str, Any], *, positions: bool, redacted: bool) -> dict[str, Any]:
    """Return the manifest of a run that begins; `provenance` has what only the caller knows, our keys win."""
    return {
        "preset": None,
        **provenance,
        "schema_version": SCHEMA_VERSION,
        "sfi_version": __version__,
        "created": now(),
        "run_id": event.run_id,
        "began_unix_ns": event.began_unix_ns,
        "rank": event.rank,
        "ranks": event.ranks,
        "finished": None,
        "stopped": None,
        "redacted": redacted,
        "positions": positions,
        "graphs": None,
        "not_replayed": None,
        "audit": None if event.audit is None else dict(event.audit),
        "model": dict(event.model),
        "policy": event.policy,
        "lossless": event.lossless,
        "backend": event.backend,
        "device": event.device,
        "config": dict(event.config),
        "trigger_token_ids": list(event.trigger_token_ids),
        "prompts": [],
        "versions": versions(),
    }


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
