"""Reads the arrays of an import file by name, each only when it is asked for."""

import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib import format  # noqa: A004 - numpy's name

from sfi_core.errors import InputError
from sfi_core.machine.text import first_line, shown
from sfi_traces.importing.schema import VERSION_NAME, check_version
from sfi_traces.schema import MOST_TOKENS

UNPACKED, RATIO = 64 << 20, 100  # bytes that a file may unpack to, and so many times its own
FORMATS = (".npz", ".parquet", ".pt")
ATTENTIONS = "attentions"  # transformers' nested tuples, in a .pt file

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a file: their names, in its order, and what reads one, as numpy's or PyTorch's."""

    path: Path
    names: tuple[str, ...]
    read: Callable[[str], Any]

    def array(
        self, name: str, kinds: str, dimensions: tuple[int, ...], part: Callable[[Any], Any] = lambda whole: whole
    ) -> Array:
        """Return an array, floating-point tensors as float32.

        `kinds` are the allowed kinds of numpy dtypes, such as "iu"; `dimensions` the allowed numbers of
        dimensions; `part` cuts out what is wanted, before the conversion. Raises `InputError` for another or
        a missing array.
        """
        if name not in self.names:
            raise InputError(f"import {self.path} must have {name}, got none")
        with readable(self.path):
            value = np.asarray(plain(part(self.read(name))))
        if value.dtype.kind not in kinds:
            wanted = {"i": "whole numbers", "f": "numbers", "U": "strings"}[kinds[0]]
            raise InputError(f"{name} of {self.path} must be {wanted}, got {value.dtype}")
        if value.ndim not in dimensions:
            some = " or ".join(map(str, dimensions))
            raise InputError(f"{name} of {self.path} must have {some} dimensions, got shape {list(value.shape)}")
        return value

    def maybe(self, name: str, kinds: str, dimensions: tuple[int, ...]) -> Array | None:
        """Return an array as `array` does, or None if the file has none."""
        return self.array(name, kinds, dimensions) if name in self.names else None

    def number(self, name: str, *, least: int) -> int | None:
        """Return a whole number, None if the file has none; raises `InputError` for another value."""
        found = self.maybe(name, "iu", (0,))
        if found is not None and not least <= found <= MOST_TOKENS:
            rule = f"at least {least}" if found < least else f"at most {MOST_TOKENS:,}"
            raise InputError(f"{name} of {self.path} must be {rule}, got {found}")
        return None if found is None else int(found)

    def check_version(self) -> None:
        """Raise `InputError` for a file without the schema's version, or of another one."""
        found = None
        if VERSION_NAME in self.names:
            with readable(self.path):
                array = np.asarray(plain(self.read(VERSION_NAME)))
            found = array.item() if array.size == 1 else array.tolist()
        check_version(self.path, found)


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """Open a .npz or .pt file, running no code from it; its arrays can be read within the block.

    Raises `InputError` if the file cannot be read.
    """
    if path.suffix == ".pt":
        with readable(path):
            arrays = _pt(path)
        yield arrays
        return
    with ExitStack() as stack:
        with readable(path):
            _check_claims(path)
            file = stack.enter_context(np.load(path, allow_pickle=False))
        yield Arrays(path, tuple(file.files), file.__getitem__)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the exceptions that libraries raise for a damaged file into one `InputError`."""
    damaged = (OSError, EOFError, ValueError, LookupError, RuntimeError, TypeError, OverflowError, MemoryError)
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"import {path} must be a file, got none") from error
    except (*damaged, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise InputError(f"import {path} cannot be read as {path.suffix}: {first_line(error)}") from error


def _check_claims(path: Path) -> None:
    # before an array is read: memory is taken for what its header says
    with zipfile.ZipFile(path) as archive:
        claimed, size = sum(one.file_size for one in archive.infolist()), path.stat().st_size
        if claimed > UNPACKED + RATIO * size:
            raise ValueError(f"it must unpack to {UNPACKED + RATIO * size:,} bytes at most, got {claimed:,}")
        for one in archive.infolist():
            with archive.open(one) as member:
                read = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
                shape, _, kind = read[format.read_magic(member)](member)
                if math.prod(shape) * max(1, kind.itemsize) > one.file_size:
                    raise ValueError(f"{one.filename} must hold the numbers of its shape, {shown(shape)}")


def _pt(path: Path) -> Arrays:
    document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(document, Mapping):
        raise ValueError(f"it must be a dict, got {type(document).__name__}")  # noqa: TRY004 - as above
    values = {str(name): value for name, value in document.items() if name != ATTENTIONS}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name} must hold the numbers of its shape, {shown(list(value.shape))}")
    for number, layers in enumerate(_passes(path, document.get(ATTENTIONS, ()))):
        values |= {f"attention.{number}.{layer}": tensor for layer, tensor in enumerate(layers)}
    return Arrays(path, tuple(values), values.__getitem__)


def _passes(path: Path, attentions: Any) -> Any:
    # `generate` returns a tuple of passes, each a tuple of layers; a forward pass returns its layers
    passes = (attentions,) if _are(attentions, torch.Tensor) and len(attentions) else attentions
    if not _are(passes, list | tuple) or not all(_are(layers, torch.Tensor) for layers in passes):
        raise InputError(  # attention other than "eager" returns None for each layer
            f'attentions of {path} must be tuples of tensors, as a model with attn_implementation="eager" '
            "returns them, got something else"
        )
    return passes


def _are(values: Any, kind: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, kind) for one in values)


def plain(value: Any) -> Any:
    """Return a tensor as a numpy array, floats as float32; return anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).numpy()
