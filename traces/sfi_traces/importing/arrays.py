"""Reads the arrays of an import file by name, each only when it is asked for, and its one request's tokens.

docs/import.md describes the file. Dimensions: N steps from step 0 on, L layers, H heads, U pairs of a layer and a
head, K positions of a selection, B blocks of a selection, P tokens of the prompt.
"""

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.lib import format  # noqa: A004 - numpy's name

from sfi_core.errors import InputError
from sfi_core.machine.text import LONGEST, first_line, printable, shown
from sfi_traces.overlap import Array, Floats, Ints
from sfi_traces.schema import MOST_TOKENS

VERSION = 1
VERSION_NAME = "sfi_import_version"
UNPACKED, RATIO = 64 << 20, 100  # bytes that a file may unpack to, and so many times its own
LARGEST = 2**31 - 1  # greatest token id of a trace
FORMATS = (".npz", ".pt")
# arrays of every file
COMMON = (VERSION_NAME, "token_ids", "prompt_token_ids", "prompt_tokens", "trigger_token_ids", "model")


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a file by name, as numpy's or PyTorch's, and the attention of each pass and layer of a .pt file."""

    path: Path
    values: Mapping[str, Any]
    passes: Sequence[Sequence[torch.Tensor]] = ()

    def array(self, name: str, kinds: str, dimensions: tuple[int, ...]) -> Array:
        """Return an array, floating-point tensors as float32.

        Raises `InputError` for a missing one, and unless its numpy dtype is of one of `kinds`, such as "iu", and its
        number of dimensions one of `dimensions`.
        """
        if name not in self.values:
            raise InputError(f"import {self.path} must have {name}, got none")
        with readable(self.path):
            array = plain(self.values[name])
        if array.dtype.kind not in kinds:
            wanted = {"i": "whole numbers", "f": "numbers", "U": "strings"}[kinds[0]]
            raise InputError(f"{name} of {self.path} must be {wanted}, got {array.dtype}")
        if array.ndim not in dimensions:
            some = " or ".join(map(str, dimensions))
            raise InputError(f"{name} of {self.path} must have {some} dimensions, got shape {list(array.shape)}")
        return array

    def maybe(self, name: str, kinds: str, dimensions: tuple[int, ...]) -> Array | None:
        """Return an array as `array` does, or None if the file has none."""
        return self.array(name, kinds, dimensions) if name in self.values else None

    def number(self, name: str) -> int | None:
        """Return a positive whole number, None if the file has none; raises `InputError` for another value."""
        number = self.maybe(name, "iu", (0,))
        if number is not None and not 1 <= number <= MOST_TOKENS:
            raise InputError(f"{name} of {self.path} must be in 1 to {MOST_TOKENS:,}, got {number}")
        return None if number is None else int(number)

    def check_names(self, *more: str) -> None:
        """Raise `InputError` for an array that is neither `COMMON` nor one of `more`, such as a misspelt one."""
        known = (*COMMON, *more)
        for name in self.values:
            if name not in known:
                raise InputError(f"import {self.path} has an unknown array {shown(name)}; expected some of {known}")


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """Open a .npz or .pt file for the block, running no code from it; raises `InputError` for another file."""
    if path.suffix not in FORMATS:
        advice = "; docs/import.md makes arrays of its rows" if path.suffix == ".parquet" else ""
        raise InputError(f"import {path} must end in one of {FORMATS}, got {path.suffix or 'nothing'}{advice}")
    if path.exists() and not path.is_file():
        raise InputError(f"import {path} must be a regular file, got another")
    with ExitStack() as stack:
        with readable(path):
            if path.suffix == ".pt":
                arrays = _attention(path)
            else:
                _check_claims(path)
                arrays = Arrays(path, stack.enter_context(np.load(path, allow_pickle=False)))
        version = arrays.array(VERSION_NAME, "iufbU", (0, 1))
        number = str(version.item() if version.size == 1 else version.ravel().tolist())
        if number != str(VERSION):
            raise InputError(
                f"import {path} has {VERSION_NAME} {printable(number)[:LONGEST]}, this sfi reads {VERSION}; "
                f"upgrade sfi, or write version {VERSION}"
            )
        yield arrays


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
        claimed, size = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
        if claimed > UNPACKED + RATIO * size:
            raise ValueError(f"it must unpack to {UNPACKED + RATIO * size:,} bytes at most, got {claimed:,}")
        for entry in archive.infolist():
            with archive.open(entry) as member:
                read = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
                shape, _, kind = read[format.read_magic(member)](member)
                if math.prod(shape) * max(1, kind.itemsize) > entry.file_size:
                    raise ValueError(f"{entry.filename} must hold the numbers of its shape, {shown(shape)}")


def _attention(path: Path) -> Arrays:
    document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(document, Mapping):
        raise ValueError(f"it must be a dict, got {type(document).__name__}")  # noqa: TRY004 - as above
    values = {str(name): value for name, value in document.items() if name != "attentions"}
    passes: Any = document.get("attentions")
    if _are(passes, torch.Tensor):  # a forward pass returns its layers, `generate` a tuple of passes
        passes = (passes,)
    if not _are(passes, list | tuple) or not all(_are(layers, torch.Tensor) for layers in passes):
        raise InputError(  # attention other than "eager" returns None for each layer
            f'attentions of {path} must be tuples of tensors, as a model with attn_implementation="eager" '
            "returns them, got something else"
        )
    for name, value in (*values.items(), *(("attentions", layer) for layers in passes for layer in layers)):
        if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name} must hold the numbers of its shape, {shown(list(value.shape))}")
    return Arrays(path, values, passes)


def _are(values: Any, kind: Any) -> bool:
    return isinstance(values, list | tuple) and len(values) > 0 and all(isinstance(value, kind) for value in values)


def plain(value: Any) -> Array:
    """Return a tensor as a numpy array, floats as float32; return an array unchanged."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    return np.asarray((value.float() if value.is_floating_point() else value).numpy())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A request's prompt of P tokens, generated ids [N], T_trig and model; None is what a file lacks."""

    prompt_tokens: int
    prompt_ids: Ints | None
    token_ids: Ints
    triggers: tuple[int, ...] | None
    model: str | None

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Read the tokens of a file; raises `InputError` if tokens are missing or disagree."""
        token_ids, prompt_ids, prompt_tokens = _ids(arrays, "token_ids"), None, arrays.number("prompt_tokens")
        if "prompt_token_ids" in arrays.values:
            prompt_ids = _ids(arrays, "prompt_token_ids")
            if prompt_tokens not in (None, len(prompt_ids)):
                raise InputError(
                    f"prompt_tokens of {arrays.path} must be {len(prompt_ids):,}, as the ids are, got {prompt_tokens:,}"
                )
            prompt_tokens = len(prompt_ids)
        if prompt_tokens is None:
            raise InputError(f"import {arrays.path} must have prompt_token_ids or prompt_tokens, got neither")
        triggers = arrays.maybe("trigger_token_ids", "iu", (1,))
        model = arrays.maybe("model", "U", (0,))
        return cls(
            prompt_tokens=prompt_tokens,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            triggers=None if triggers is None else tuple(sorted(triggers.tolist())),
            model=None if model is None else str(model),
        )


def _ids(arrays: Arrays, name: str) -> Ints:
    ids = arrays.array(name, "iu", (1,))
    if not len(ids):
        raise InputError(f"{name} of {arrays.path} must have an id, got none")
    wrong = (ids < 0) | (ids > LARGEST)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{name} of {arrays.path} must be in 0 to {LARGEST}, got {ids[at]} at {at}")
    return ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedStep:
    """What one step read, checked; step t comes t-th, and has P + t cached tokens, the query's own included.

    Positions ascend, padded with -1; their probabilities under dense attention, and that of all that the step
    attended, are None where unknown. `attended_tokens` is the mean over heads.
    """

    index_UK: Ints
    mass_UK: Floats | None
    retained_U: Floats | None
    attended_tokens: float
