"""GGUF files: what makes transformers load them fast and run none of a hub's code, and what it drops without a word."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import cached_file

from sfi_core.errors import not_installed
from sfi_core.models.gguf_header import Header

DTYPE = torch.float32  # what "auto" makes of quantized weights
PACKAGES = ("gguf", "accelerate")  # transformers asks for both
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # how llama.cpp names the parts of a split file
_reading = RLock()
PIECE = 1 << 17  # numbers that are unpacked at once: they stay in a processor's cache


def check_packages() -> None:
    """Raise `BackendError` where a package that reads GGUF files is missing."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise not_installed("GGUF files need", package, "gguf")


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers read a file's head once, unpack it in large pieces, and show no progress bar.

    transformers reads the head at each use, and works out the names of all tensors anew for each of the model's
    modules; gguf unpacks 16 rows at a time.
    """
    import gguf  # noqa: PLC0415 - of an extra

    with _reading:  # another thread's load waits: it would put back what it finds here
        quick = {
            "GGUFReader": read_header, "dequantize": _dequantizer(gguf),
            "get_tensor_name_map": cache(gguf.get_tensor_name_map),
        }  # fmt: skip
        slow = {name: getattr(gguf, name) for name in quick}
        try:
            for name, function in quick.items():
                setattr(gguf, name, function)
            with redirect_stderr(StringIO()):
                yield
        finally:
            read_header.cache_clear()
            for name, function in slow.items():
                setattr(gguf, name, function)


def _dequantizer(gguf: Any) -> Callable[[np.ndarray, Any], Any]:
    plain = gguf.dequantize

    def dequantize(packed: np.ndarray, kind: Any) -> Any:
        quants = getattr(gguf.quants, kind.name, None)
        if quants is None or not packed.size:
            return plain(packed, kind)
        quants.init_grid()
        shape = gguf.quant_shape_from_byte_shape(packed.shape, kind)
        rows, numbers = packed.reshape(-1, packed.shape[-1]), np.empty(shape, np.float32)
        unpacked = numbers.reshape(-1, shape[-1])
        step = max(1, PIECE // shape[-1])
        for row in range(0, len(rows), step):
            unpacked[row : row + step] = quants.dequantize_rows(rows[row : row + step])
        return numbers

    return dequantize


def whole_weights() -> dict[str, Any]:
    """Return the option that has transformers unpack all weights: code of the hub multiplies packed ones."""
    config = getattr(transformers, "GgufConfig", None)  # since 5.17
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a split file, in order; of another file its name."""
    match = PART.fullmatch(file)
    if match is None:
        return [file]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


@cache
def read_header(path: str) -> Header:
    """Read a file's head, with the tensors of all parts if it is split.

    Raise `OSError` for a missing file, `ValueError` for one that is damaged, not GGUF, or not the first of all its
    parts.
    """
    file = Path(path)
    parts, header = part_names(file.name), Header.read(file)
    count = header.metadata.get("split.count") or 1
    if count != len(parts):
        raise ValueError(f"it must be split into as many parts as its name says, {len(parts)}, got {str(count)[:80]}")
    if file.name != parts[0]:
        raise ValueError(f"it is a part of a file that is split into {len(parts)}; say the first, {parts[0]}")
    tensors = list(header.tensors)
    for name in parts[1:]:
        try:
            tensors += Header.read(file.with_name(name)).tensors
        except FileNotFoundError as error:
            raise ValueError(f"it is split into {len(parts)} parts, of which {name} is missing") from error
    return replace(header, tensors=tensors)


def read_metadata(place: str, file: str, revision: str | None) -> dict[str, Any]:
    """Return a file's metadata, under `tensors` the names of its tensors; of a split file, fetch all parts.

    Raise as `read_header` does.
    """
    first = cached_file(place, file, revision=revision)
    if not Path(place).is_dir():
        for name in part_names(file):
            cached_file(place, name, revision=revision)
    header = read_header(first)
    return {**header.metadata, "tensors": [tensor.name for tensor in header.tensors]}


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
