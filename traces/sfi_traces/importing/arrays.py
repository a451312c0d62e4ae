"""The arrays of a file by name, whatever its format; nothing is read before it is asked for."""

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

from sfi_core.errors import InputError
from sfi_traces.importing.schema import VERSION_NAME, check_version

FORMATS = (".npz", ".parquet", ".pt")
ATTENTIONS = "attentions"  # transformers' nested tuples, in a .pt file

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a file.

    Attributes:
        path: The file.
        names: Names of the arrays, in the file's order.
        read: Reads one of them, as numpy or PyTorch have it.
    """

    path: Path
    names: tuple[str, ...]
    read: Callable[[str], Any]

    def array(
        self,
        name: str,
        kinds: str,
        dimensions: tuple[int, ...],
        part: Callable[[Any], Any] = lambda whole: whole,
    ) -> Array:
        """Return an array, floating-point tensors as float32.

        Args:
            name: Name of the array.
            kinds: Kinds of numpy's types that it may have, "iu" say.
            dimensions: Numbers of dimensions that it may have.
            part: Takes of the array what is wanted, before it is converted.

        Raises:
            InputError: It is missing, or of another type or shape.
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
            raise InputError(
                f"{name} of {self.path} must have {some} dimensions, got shape {list(value.shape)}"
            )
        return value

    def maybe(self, name: str, kinds: str, dimensions: tuple[int, ...]) -> Array | None:
        """Return an array, or None where there is none.

        Raises:
            InputError: It is of another type or shape.
        """
        return self.array(name, kinds, dimensions) if name in self.names else None

    def number(self, name: str, *, least: int) -> int | None:
        """Return a whole number, or None where there is none.

        Raises:
            InputError: It is something else, or too small.
        """
        found = self.maybe(name, "iu", (0,))
        if found is not None and found < least:
            raise InputError(f"{name} of {self.path} must be at least {least}, got {found}")
        return None if found is None else int(found)

    def check_version(self) -> None:
        """Refuse a file of another version.

        Raises:
            InputError: It is another one, or there is none.
        """
        found = None
        if VERSION_NAME in self.names:
            with readable(self.path):
                array = np.asarray(plain(self.read(VERSION_NAME)))
            found = array.item() if array.size == 1 else array.tolist()
        check_version(self.path, found)


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """Open a .npz or .pt file; nothing in it is run as code.

    Yields:
        Its arrays, which can be read until the end of the block.

    Raises:
        InputError: It cannot be read.
    """
    if path.suffix == ".pt":
        with readable(path):
            arrays = _pt(path)
        yield arrays
        return
    with ExitStack() as stack:
        with readable(path):
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")  # noqa: TRY004 - as of a damaged file
            stack.enter_context(file)
        yield Arrays(path, tuple(file.files), file.__getitem__)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what libraries say of a damaged file into one line.

    Raises:
        InputError: The file is missing, damaged or not what its name says.
    """
    damaged = (
        OSError, EOFError, ValueError, KeyError, RuntimeError, TypeError, IndexError, OverflowError,
    )  # fmt: skip
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"import {path} must be a file, got none") from error
    except (*damaged, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"import {path} cannot be read as {path.suffix}: {line}") from error


def _pt(path: Path) -> Arrays:
    document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(document, Mapping):
        raise ValueError(f"it must be a dict, got {type(document).__name__}")  # noqa: TRY004 - as above
    values = {str(name): value for name, value in document.items() if name != ATTENTIONS}
    for number, layers in enumerate(_passes(path, document.get(ATTENTIONS, ()))):
        values |= {f"attention.{number}.{layer}": tensor for layer, tensor in enumerate(layers)}
    return Arrays(path, tuple(values), values.__getitem__)


def _passes(path: Path, attentions: Any) -> Any:
    # `generate` has a tuple of passes, each of layers; one forward pass has the layers alone
    passes = (attentions,) if _are(attentions, torch.Tensor) and len(attentions) else attentions
    if not _are(passes, list | tuple) or not all(_are(layers, torch.Tensor) for layers in passes):
        # another implementation returns None for each layer
        raise InputError(
            f'attentions of {path} must be tuples of tensors, as a model with attn_implementation="eager" '
            "returns them, got something else"
        )
    return passes


def _are(values: Any, kind: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, kind) for one in values)


def plain(value: Any) -> Any:
    """Return a tensor as numpy has it, floating-point numbers as float32; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).numpy()
