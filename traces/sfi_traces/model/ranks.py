"""Finds the traces of a run's ranks in a folder, and checks that they belong together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.record.folder import rank_folder, rank_folders
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION

REQUIRED = ("finished", "model", "policy", "config", "trigger_token_ids")  # of a manifest
OF_A_RANK = ("query_heads", "weight_bytes", "embedding_bytes")  # a rank's share of the model

Manifest = dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Read a trace's manifest; raises `TraceError` for none, a damaged or a newer one."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["schema_version"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceError(f"{folder} is not a trace: it has no {MANIFEST}{_advice(folder)}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"trace {folder} has an unreadable {MANIFEST}: {error}") from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise TraceError(f"trace {folder} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi")
    if missing := [key for key in REQUIRED if key not in manifest]:
        raise TraceError(f"trace {folder} has a {MANIFEST} without {', '.join(missing)}")
    return manifest  # type: ignore[no-any-return]


def other_ranks(folder: Path, manifest: Manifest) -> dict[Path, Manifest]:
    """Read the manifests of ranks 1 and up that have one; raises `TraceError` for ranks of different runs."""
    found = {
        rank: (path, read_manifest(path)) for rank, path in rank_folders(folder).items() if (path / MANIFEST).exists()
    }
    ours = _run(manifest)
    for rank, (path, theirs) in {0: (folder, manifest), **found}.items() if found else ():
        if theirs.get("rank", 0) != rank:
            raise TraceError(f"trace {path} must be of rank {rank}, got rank {theirs.get('rank', 0)}")
        if _run(theirs) != ours:
            raise TraceError(
                f"trace {folder} must have ranks of one run, got rank {rank} of the run of "
                f"{theirs.get('created')} beside rank 0 of that of {manifest.get('created')}"
            )
    return dict(found.values())


def whole_model(manifest: Manifest) -> Manifest:
    """Return a rank's manifest with the heads and bytes of the whole model."""
    ranks = manifest.get("ranks", 1)
    if ranks == 1:
        return manifest
    model: Mapping[str, Any] = manifest["model"]
    layers = [layer | {"heads": ranks * layer["heads"]} for layer in model["layers"]]
    more = {name: ranks * model[name] for name in OF_A_RANK if name in model}
    return manifest | {"model": {**model, **more, "layers": layers}}


def _run(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.get("run_id"), manifest.get("ranks", 1)


def _advice(folder: Path) -> str:
    left = [rank for rank in rank_folders(folder) if (rank_folder(folder, rank) / MANIFEST).exists()]
    if not left:
        return ""
    return f" of rank 0; rank {left[0]} alone is {rank_folder(folder, left[0])}"
