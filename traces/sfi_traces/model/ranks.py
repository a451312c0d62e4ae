"""Finds the traces of a run's ranks in a folder, and checks that they belong together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.model.manifest import read_manifest
from sfi_traces.record.folder import rank_folder, rank_folders
from sfi_traces.schema import MANIFEST

OF_A_RANK = ("query_heads", "weight_bytes", "embedding_bytes")  # a rank's share of the model

Manifest = dict[str, Any]


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


def rank_advice(folder: Path) -> str:
    """Say which ranks a folder holds without rank 0's manifest; "" for none."""
    left = [rank for rank in rank_folders(folder) if (rank_folder(folder, rank) / MANIFEST).exists()]
    if not left:
        return ""
    return f" of rank 0; rank {left[0]} alone is {rank_folder(folder, left[0])}"
