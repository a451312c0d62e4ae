"""GGUF files: how transformers loads them fast, and what it drops without a word."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from typing import Any

import torch
from transformers.utils import cached_file

from sfi_core.errors import not_installed

DTYPE = torch.float32  # what "auto" makes of quantized weights
PACKAGES = ("gguf", "accelerate")  # transformers asks for both


def check_packages() -> None:
    """Raise `BackendError` where a package that reads GGUF files is missing."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise not_installed("GGUF files need", package, "gguf")


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse a file once, not once a use, and without a progress bar.

    A parse takes seconds, mostly for the vocabulary; transformers also works out the names of all tensors
    anew for each of the model's modules.
    """
    import gguf  # noqa: PLC0415 - of an extra

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, cache(function))
        with redirect_stderr(StringIO()):
            yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def read_metadata(place: str, file: str, revision: str | None) -> dict[str, Any]:
    """Return a file's metadata; under `tensors` the names of its tensors.

    Raise `OSError` for a missing file, `ValueError` for a file that is not GGUF.
    """
    import gguf  # noqa: PLC0415 - of an extra

    reader = gguf.GGUFReader(cached_file(place, file, revision=revision))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return {**metadata, "tensors": [tensor.name for tensor in reader.tensors]}


def check_positions(config: Any, metadata: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a file scales positions and transformers dropped the scaling."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default":
        return
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    factors = [name for name in metadata["tensors"] if name.startswith("rope_")]
    if scaling != "none" or factors:
        what = f"rope scaling {scaling!r}" if scaling != "none" else factors[0]
        raise ValueError(
            f"its positions are scaled ({what}), which transformers does not read from a GGUF file; "
            "use the model's folder or hub id"
        )
