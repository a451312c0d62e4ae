"""The head of a GGUF file: what it says of itself, and where its tensors are.

gguf's own reader makes numpy arrays of each token of the vocabulary, and transformers parses them one by one, at each
of its uses: seconds each. The file may be a stranger's: what it claims is checked before memory is taken for it.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by their type
TEXT, LIST = 8, 9
LENGTH = struct.Struct("<Q")
DIMENSIONS = 4  # ggml's most
PLAIN: dict[str, Any] = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    **{f"I{n}": f"i{n // 8}" for n in (8, 16, 32, 64)},
}


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
            version, tensors, count = reader.number("I"), reader.number("Q"), reader.number("Q")
            if version not in VERSIONS:
                raise ValueError(f"its GGUF version must be one of {VERSIONS}, got {version}")
            metadata = {}
            for _ in range(count):
                name = reader.text()
                if name in metadata:
                    raise ValueError(f"it has {name[:80]!r} twice")
                metadata[name] = reader.value(reader.number("I"))
            found = reader.tensors(tensors, metadata.get("general.alignment", 32))
        except struct.error as error:
            raise ValueError("it is cut off in its head") from error
        fields = {
            name: Field.of(value)
            for name, value in metadata.items()
            if name == "tokenizer.ggml.tokens" or not (name.startswith("tokenizer.") and isinstance(value, list))
        }
        return cls(metadata, found, fields)


class _Reader:
    """Reads values of a file one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        data, at, most, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            (length,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size + length
            if at > most:
                raise struct.error
            found.append(data[at - length : at].decode())
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != LIST:
            raise ValueError(f"its metadata has a value of an unknown type, {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == TEXT:
            return self.texts(count)
        if kind not in NUMBERS:
            raise ValueError(f"its metadata has a list of an unknown type, {kind}")
        width = struct.calcsize(NUMBERS[kind])
        if count > (len(self.data) - self.at) // width:
            raise struct.error
        values = struct.unpack_from(f"<{count}{NUMBERS[kind]}", self.data, self.at)
        self.at += count * width
        return list(values)

    def tensors(self, count: int, alignment: Any) -> list[Tensor]:
        places = {}
        for _ in range(count):
            name, rank = self.text(), self.number("I")
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
