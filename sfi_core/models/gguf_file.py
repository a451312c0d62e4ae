"""GGUF files: what makes transformers load them fast and run none of a hub's code, and what it drops without a word.

gguf's own reader makes numpy arrays of each token of the vocabulary, and transformers parses them one by one, at each
of its uses: seconds each. The file may be a stranger's: what it claims is checked before memory is taken for it.
"""

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from io import StringIO
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.utils import cached_file

DTYPE = torch.float32  # what "auto" makes of quantized weights
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # how llama.cpp names the parts of a split file
_reading = RLock()
PIECE = 1 << 17  # numbers that are unpacked at once: they stay in a processor's cache
MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by their type
TEXT, LIST = 8, 9
LENGTH = struct.Struct("<Q")
DIMENSIONS = 4  # ggml's most
PLAIN = {"F16": "f2", "F32": "f4", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}


class Field(NamedTuple):
    """A value as transformers reads it from gguf's reader; of a list of texts, its length alone counts there."""

    parts: list[Any]
    data: range
    types: list[int]

    @classmethod
    def of(cls, value: Any) -> "Field":
        """Take one value or a list of one kind."""
        values = value if isinstance(value, list) else [value]
        if isinstance(value, str):
            return cls([value.encode()], range(1), [TEXT])
        kind = {"bool": 7, "float": 6}.get(type(values[0]).__name__ if values else "", 4)
        parts = [(0,)] * len(values) if values and isinstance(values[0], str) else [(number,) for number in values]
        return cls(parts, range(len(parts)), [kind])


class Tensor(NamedTuple):
    """A tensor of the file, of plain numbers or of the bytes of its blocks; slowest dimension first."""

    name: str
    tensor_type: Any
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Header:
    """A file's `metadata` by name, its `tensors`, and its metadata as `fields` for transformers."""

    metadata: dict[str, Any]
    tensors: list[Tensor]
    fields: dict[str, Field]

    @classmethod
    def read(cls, path: Path) -> "Header":
        """Read a file; raise `OSError` for a missing one, `ValueError` for one that is damaged or not GGUF."""
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError("it is no GGUF file, which begins with the letters GGUF")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            reader = _Reader(data)
            version, count, fields_count = (reader.number(kind) for kind in "IQQ")
            if version not in VERSIONS:
                raise ValueError(f"its GGUF version must be one of {VERSIONS}, got {version}")
            metadata = {}
            for _ in range(fields_count):
                (name,) = reader.texts(1)
                if name in metadata:
                    raise ValueError(f"it has {name[:80]!r} twice")
                metadata[name] = reader.value(reader.number("I"))
            tensors = reader.tensors(count, metadata.get("general.alignment", 32))
        except struct.error as error:
            raise ValueError("it is cut off in its head") from error
        fields = {
            name: Field.of(value)
            for name, value in metadata.items()
            if name == "tokenizer.ggml.tokens" or not (name.startswith("tokenizer.") and isinstance(value, list))
        }
        return cls(metadata, tensors, fields)


class _Reader:
    """Reads values of a file one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{kind}")
        return values

    def number(self, kind: str) -> Any:
        return self.numbers(kind)[0]

    def texts(self, count: int) -> list[str]:
        data, at, most = self.data, self.at, len(self.data)
        texts = []
        for _ in range(count):
            (length,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size + length
            if at > most:
                raise struct.error
            texts.append(data[at - length : at].decode())
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        what, count = "value", 1
        if is_list := kind == LIST:
            what, kind, count = "list", self.number("I"), self.number("Q")
        if kind != TEXT and kind not in NUMBERS:
            raise ValueError(f"its metadata has a {what} of an unknown type, {kind}")
        values = self.texts(count) if kind == TEXT else list(self.numbers(NUMBERS[kind], count))
        return values if is_list else values[0]

    def tensors(self, count: int, alignment: Any) -> list[Tensor]:
        places = {}
        for _ in range(count):
            name, rank = self.texts(1)[0], self.number("I")
            if name in places:
                raise ValueError(f"it has the tensor {name[:80]!r} twice")
            sizes = [self.number("Q") for _ in range(min(rank, DIMENSIONS))][::-1]
            if rank > DIMENSIONS or 0 in sizes:
                raise ValueError(f"tensor {name[:80]} must have 1 to {DIMENSIONS} dimensions, none empty, got {sizes}")
            places[name] = (sizes, self.number("I"), self.number("Q"))
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment must be a power of two, got {str(alignment)[:80]}")
        begin = -(-self.at // alignment) * alignment
        return [self._tensor(name, sizes, kind, begin + offset) for name, (sizes, kind, offset) in places.items()]

    def _tensor(self, name: str, sizes: list[int], number: int, begin: int) -> Tensor:
        import gguf  # noqa: PLC0415 - of an extra

        kind = gguf.GGMLQuantizationType(number)
        if kind.name in PLAIN:
            dtype, shape = np.dtype(PLAIN[kind.name]), tuple(sizes)
        else:
            dtype, shape = np.dtype(np.uint8), gguf.quant_shape_to_byte_shape(tuple(sizes) or (1,), kind)
        if begin + prod(shape) * dtype.itemsize > len(self.data):
            raise ValueError(f"it is cut off: tensor {name[:80]} ends after the file")
        return Tensor(name, kind, np.frombuffer(self.data, dtype, prod(shape), begin).reshape(shape))


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers read a file's head once and work names out once, let gguf unpack large pieces, without a bar."""
    import gguf  # noqa: PLC0415 - of an extra

    with _reading, ExitStack() as stack:  # another thread's load waits: it would put back what it finds here
        names = cache(gguf.get_tensor_name_map)
        quick = {"GGUFReader": read_header, "dequantize": _dequantizer(gguf), "get_tensor_name_map": names}
        stack.enter_context(replaced(gguf, quick))
        stack.callback(read_header.cache_clear)
        stack.enter_context(redirect_stderr(StringIO()))
        if hasattr(transformers, "GgufConfig"):  # since 5.17, with a reader of its own
            for name in ("integrations.gguf", "quantizers.quantizer_gguf"):
                reader = import_module(f"transformers.{name}")
                stack.enter_context(replaced(reader, {"read_gguf_metadata": _counted}))
        yield


@contextmanager
def replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, let names of a module have other values."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _counted(path: str, texts: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[str]]:
    # metadata and names of tensors as transformers' own reader gives them: of lists of texts often their lengths
    header = read_header(path)
    lists = {
        name: len(value)
        for name, value in header.metadata.items()
        if name not in texts and isinstance(value, list) and value and isinstance(value[0], str)
    }
    return {**header.metadata, **lists}, [tensor.name for tensor in header.tensors]


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

    Raise `OSError` for a missing file, `ValueError` for one that is damaged, not GGUF, or not the first of its parts.
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
    """Return a file's metadata, under `tensors` their names; fetch all parts of it. Errors are `read_header`'s."""
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
