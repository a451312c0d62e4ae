"""Reads the arrays of an import file by name, each only when it is asked for, and its one request's tokens.

docs/import.md describes the file. Dimensions: N steps from step 0 on, L layers, H heads, U pairs of a layer and a
head, K positions of a selection, B blocks of a selection, P tokens of the prompt.
"""

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format  # noqa: A004 - numpy's name

from sfi_core.errors import InputError
from sfi_core.machine.text import LONGEST, first_line, printable, shown
from sfi_traces.overlap import Array, Floats, Ints
from sfi_traces.schema import MOST_TOKENS

VERSION = 1
VERSION_NAME = "sfi_import_version"
UNPACKED, RATIO = 64 << 20, 100  # bytes that a file may unpack to, and so many times its own
LARGEST = 2**31 - 1  # greatest token id of a trace
SUFFIX = ".npz"
# arrays of every file
COMMON = (
    VERSION_NAME, "token_ids", "prompt_token_ids", "prompt_tokens", "token_texts", "prompt_token_texts",
    "trigger_token_ids", "model",
)  # fmt: skip

Place = tuple[int, int]  # layer, head


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a file."""

    path: Path
    file: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, in the file's order."""
        return tuple(self.file.files)

    def array(self, name: str, kinds: str, dimensions: tuple[int, ...]) -> Array:
        """Return an array.

        `kinds` are the allowed kinds of numpy dtypes, such as "iu"; `dimensions` the allowed numbers of
        dimensions. Raises `InputError` for another or a missing array.
        """
        if name not in self.names:
            raise InputError(f"import {self.path} must have {name}, got none")
        with readable(self.path):
            value = np.asarray(self.file[name])
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
        number = self.maybe(name, "iu", (0,))
        if number is not None and not least <= number <= MOST_TOKENS:
            rule = f"at least {least}" if number < least else f"at most {MOST_TOKENS:,}"
            raise InputError(f"{name} of {self.path} must be {rule}, got {number}")
        return None if number is None else int(number)

    def check_version(self) -> None:
        """Raise `InputError` for a file without the schema's version, or of another one."""
        if VERSION_NAME not in self.names:
            raise InputError(f"import {self.path} must have {VERSION_NAME} {VERSION}, got none")
        with readable(self.path):
            array = np.asarray(self.file[VERSION_NAME])
        version = str(array.item() if array.size == 1 else array.ravel().tolist())
        if version != str(VERSION):
            raise InputError(
                f"import {self.path} has {VERSION_NAME} {printable(version)[:LONGEST]}, this sfi reads {VERSION}; "
                f"upgrade sfi, or write version {VERSION}"
            )

    def check_names(self, names: Sequence[str], known: Sequence[str]) -> None:
        """Raise `InputError` for an array that the schema does not have, such as a misspelt one."""
        for name in names:
            if name not in known:
                raise InputError(f"import {self.path} has an unknown array {shown(name)}; expected some of {known}")


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """Open a .npz file, running no code from it; its arrays can be read within the block.

    Raises `InputError` if the file cannot be read, has another version, or ends in something else.
    """
    if path.suffix != SUFFIX:
        raise InputError(
            f"import {path} must end in {SUFFIX}, got {path.suffix or 'nothing'}; docs/import.md makes arrays of others"
        )
    if path.exists() and not path.is_file():
        raise InputError(f"import {path} must be a regular file, got another")
    with readable(path):
        _check_claims(path)
        file = np.load(path, allow_pickle=False)
    with file:
        arrays = Arrays(path, file)
        arrays.check_version()
        yield arrays


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the exceptions that libraries raise for a damaged file into one `InputError`."""
    damaged = (OSError, EOFError, ValueError, LookupError, RuntimeError, TypeError, OverflowError, MemoryError)
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"import {path} must be a file, got none") from error
    except (*damaged, zipfile.BadZipFile) as error:
        raise InputError(f"import {path} cannot be read as {SUFFIX}: {first_line(error)}") from error


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A request's prompt, generated ids and texts, T_trig and model; what the file does not say is None.

    Attributes:
        prompt_tokens: P, known without the ids too.
        token_ids: The tokens that the steps generated, [N].
        triggers: T_trig.
    """

    prompt_tokens: int
    prompt_ids: Ints | None
    prompt_texts: list[str] | None
    token_ids: Ints
    texts: list[str] | None
    triggers: tuple[int, ...] | None
    model: str | None

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Read the tokens of a file; raises `InputError` if tokens are missing or disagree."""
        token_ids, prompt_ids, prompt_tokens = _ids(arrays, "token_ids"), None, arrays.number("prompt_tokens", least=1)
        if "prompt_token_ids" in arrays.names:
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
            prompt_texts=None if prompt_ids is None else _texts(arrays, "prompt_token_texts", prompt_tokens),
            token_ids=token_ids,
            texts=_texts(arrays, "token_texts", len(token_ids)),
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


def _texts(arrays: Arrays, name: str, tokens: int) -> list[str] | None:
    texts = arrays.maybe(name, "U", (1,))
    if texts is not None and len(texts) != tokens:
        raise InputError(f"{name} of {arrays.path} must be {tokens:,}, as the ids are, got {len(texts):,}")
    return None if texts is None else [str(text) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """What is known of a file before its steps are read.

    Attributes:
        place_U: The layers and heads, ascending.
        heads: Heads of a layer.
        masses: Whether the positions have their probability under dense attention.
        block_size: Positions of a block; None for positions.
    """

    tokens: Tokens
    place_U: list[Place]
    heads: int
    masses: bool
    block_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedStep:
    """What one step read, checked; step t comes t-th, and has P + t cached tokens, the query's own included.

    Attributes:
        index_UK: Positions, ascending, padded with -1; int32.
        mass_UK: Their probabilities under dense attention, 0 where padded; None where unknown.
        retained_U: Probability of all that the step attended; None where unknown.
        attended_tokens: Mean tokens read per head.
    """

    index_UK: Ints
    mass_UK: Floats | None
    retained_U: Floats | None
    attended_tokens: float
