"""What tells whether every rank loads the same checkpoint: a folder's digest, or a hub id's commit."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".jinja", ".txt", ".model", ".py")
SAMPLE = 1024  # bytes read from the middle of each tensor
PLACES = 1024  # samples of a file whose tensors' places are not known


def commit_of(hub_id: str, revision: str | None) -> str | None:
    """Return the commit on the hub that a revision has in the local cache; None where it is not there."""
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    # the cache keeps each commit's files in a folder that has the commit as its name
    return Path(config).parent.name if isinstance(config, str) else None


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's names, sizes, texts, and a sample of every tensor.

    It takes a read of a kilobyte a tensor, not of the weights: two checkpoints of one architecture differ in
    it unless they agree in all those places.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            _add_weights(digest, path)
        elif path.suffix in TEXTS:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _add_weights(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        places = [size * index // PLACES for index in range(PLACES)]
        if path.suffix == ".safetensors":
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            places = _middles(json.loads(header), file.tell())
        for place in places:
            file.seek(place)
            digest.update(file.read(SAMPLE))


def _middles(header: dict[str, Any], start: int) -> list[int]:
    # safetensors' header gives every tensor's first and last byte behind it
    ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return [start + max(first, (first + last - SAMPLE) // 2) for first, last in sorted(ends)]
