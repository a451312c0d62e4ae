"""The manifest of an evaluation's folder."""

import json
from pathlib import Path
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.files import LOCK
from sfi_core.machine.text import parse_json
from sfi_traces.schema import MANIFEST

SCHEMA_VERSION = 1
KIND = "evaluation"
# what a resumed run compares or shows
NEEDED = (
    "schema_version", "asked", "methods", "text", "model", "device", "machine", "versions", "created",
    "finished", "stopped",
)  # fmt: skip


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
