"""Reads the arrays of an import file by name, each only when it is asked for, and its one request's tokens."""

import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.lib import format  # noqa: A004 - numpy's name

from sfi_core.errors import InputError
from sfi_core.machine.text import first_line, shown
from sfi_traces.importing.schema import LARGEST, VERSION_NAME, Header, Prompt, check_version
from sfi_traces.overlap import Array, Ints
from sfi_traces.schema import MOST_TOKENS

UNPACKED, RATIO = 64 << 20, 100  # bytes that a file may unpack to, and so many times its own
FORMATS = (".npz", ".parquet", ".pt")
ATTENTIONS = "attentions"  # transformers' nested tuples, in a .pt file


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
            found = array.item() if array.size == 1 else array.ravel().tolist()
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A request's prompt, generated ids and texts, T_trig and model; what the file does not say is None."""

    prompt: Prompt
    token_ids: Ints
    texts: list[str] | None
    triggers: tuple[int, ...] | None
    model: str | None

    @classmethod
    def of(cls, arrays: Arrays, steps: int | None) -> Self:
        """Read the tokens of a file with N = `steps` steps; None if the tokens alone say how many.

        Raises `InputError` if tokens are missing, or are not as many as the steps.
        """
        token_ids = _ids(arrays, "token_ids")
        if steps is not None and len(token_ids) != steps:
            raise InputError(f"token_ids of {arrays.path} must be {steps:,}, one for each step, got {len(token_ids):,}")
        triggers = arrays.maybe("trigger_token_ids", "iu", (1,))
        model = arrays.maybe("model", "U", (0,))
        return cls(
            prompt=_prompt(arrays),
            token_ids=token_ids,
            texts=_texts(arrays, "token_texts", len(token_ids)),
            triggers=None if triggers is None else tuple(sorted(triggers.tolist())),
            model=None if model is None else str(model),
        )

    def header(self, **facts: Any) -> Header:
        """Return the header of a file of arrays; `facts` are its fields that are not of tokens."""
        return Header(
            prompts=[self.prompt], trigger_token_ids=self.triggers, model=self.model, rows=len(self.token_ids), **facts
        )


def _prompt(arrays: Arrays) -> Prompt:
    tokens = arrays.number("prompt_tokens", least=1)
    if "prompt_token_ids" not in arrays.names:
        if tokens is None:
            raise InputError(f"import {arrays.path} must have prompt_token_ids or prompt_tokens, got neither")
        return Prompt(tokens=tokens)
    ids = _ids(arrays, "prompt_token_ids")
    if tokens is not None and tokens != len(ids):
        raise InputError(f"prompt_tokens of {arrays.path} must be {len(ids):,}, as the ids are, got {tokens:,}")
    return Prompt(tokens=len(ids), token_ids=ids, texts=_texts(arrays, "prompt_token_texts", len(ids)))


def _ids(arrays: Arrays, name: str) -> Ints:
    ids = arrays.array(name, "iu", (1,))
    check_ids(ids, f"{name} of {arrays.path}")
    return ids


def check_ids(ids: Ints, what: str) -> None:
    """Raise `InputError` for an empty list of token ids, or an id that is negative or above `LARGEST`."""
    if not len(ids):
        raise InputError(f"{what} must have an id, got none")
    wrong = (ids < 0) | (ids > LARGEST)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{what} must be in 0 to {LARGEST}, got {ids[at]} at {at}")


def _texts(arrays: Arrays, name: str, tokens: int) -> list[str] | None:
    texts = arrays.maybe(name, "U", (1,))
    if texts is not None and len(texts) != tokens:
        raise InputError(f"{name} of {arrays.path} must be {tokens:,}, as the ids are, got {len(texts):,}")
    return None if texts is None else [str(text) for text in texts]
