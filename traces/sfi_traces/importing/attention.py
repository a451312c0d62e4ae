"""Imports transformers' attention: arrays `attention.PASS.LAYER`, [1, H, Q, T] each (docs/import.md)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.engine import AuditConfig
from sfi_traces.importing.arrays import COMMON, Arrays, Header, ImportedStep, Tokens
from sfi_traces.importing.selections import ROUNDING, strongest
from sfi_traces.overlap import Array, Floats

Shape = tuple[int, ...]
DIMENSIONS = 4  # request, head, query, token
NAME = re.compile(r"attention\.(\d+)\.(\d+)")


class AttentionArrays:
    """The steps of a file of attention probabilities, one forward pass after the other.

    A pass with Q queries and T cached tokens has the queries of positions T - Q to T - 1. Step t is the query
    at position P - 1 + t; earlier queries are the prompt's and are skipped.
    """

    def __init__(self, arrays: Arrays, top: int | None, kv_heads: int | None) -> None:
        """Read everything except the attention tensors; `top` and `kv_heads` as in `import_trace`.

        Raises `InputError` for an array that is missing or whose shape contradicts the others; `ConfigError` if the
        number of KV heads does not divide that of the query heads.
        """
        others = [name for name in arrays.names if not NAME.fullmatch(name)]
        arrays.check_names(others, (*COMMON, "kv_heads"))
        self._arrays = arrays
        self._passes = _passes(arrays)
        self._top = top or AuditConfig().top
        self._tokens = Tokens.of(arrays)
        self._query_heads = self._read(0, self._passes[0][0], 0)[1][1]
        self._kv_heads = kv_heads or arrays.number("kv_heads", least=1) or self._query_heads
        if self._query_heads % self._kv_heads:
            raise ConfigError(f"kv-heads must divide the {self._query_heads} query heads, got {self._kv_heads}")
        self.header = Header(
            kind="attention",
            tokens=self._tokens,
            place_U=[(layer, head) for layer in self._passes[0] for head in range(self._kv_heads)],
            query_heads=self._query_heads,
            masses=True,
            block_size=None,
        )

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; one pass at a time is in memory. Raises `InputError` for a faulty one."""
        tokens, begin = self._tokens, self._tokens.prompt_tokens - 1
        N, done = len(tokens.token_ids), 0
        for number, layers in enumerate(self._passes):
            tensors, shapes = zip(*(self._read(number, layer, done) for layer in layers), strict=True)
            Q, T = self._size(number, shapes)
            first = self._first(Q, T, done)
            for query in range(first, Q):
                position = T - Q + query
                step = position - begin
                if step == done == N:  # the query of the last token, which generated none
                    break
                if step != done:
                    raise InputError(
                        f"attention of {self._arrays.path} must have step {done:,}, the query at position "
                        f"{begin + done:,}, got pass {number} at {position:,}"
                    )
                rows = [tensor[0, :, query - first, : position + 1] for tensor in tensors]
                yield self._step(number, rows)
                done += 1
            if done == N and number + 1 < len(self._passes):
                raise InputError(
                    f"attention of {self._arrays.path} must end with the {N:,} steps of token_ids, got pass "
                    f"{number + 1}"
                )
        if done < N:
            raise InputError(f"attention of {self._arrays.path} must reach the {N:,} steps of token_ids, got {done:,}")

    def _step(self, number: int, rows: list[Array]) -> ImportedStep:
        mass_UT = np.concatenate([self._pooled(row) for row in rows])
        self._check(mass_UT, number)
        best_UK = strongest(mass_UT, np.zeros_like(mass_UT, np.int32), self._top)
        return ImportedStep(
            index_UK=best_UK.astype(np.int32),
            mass_UK=np.take_along_axis(mass_UT, best_UK, -1),
            retained_U=np.ones(len(mass_UT), np.float32),
            attended_tokens=float(mass_UT.shape[-1]),
        )

    def _pooled(self, mass_QT: Floats) -> Floats:
        group = self._query_heads // self._kv_heads
        return np.asarray(mass_QT.reshape(self._kv_heads, group, -1).mean(1, dtype=np.float32))

    def _check(self, mass_UT: Floats, number: int) -> None:
        total_U = mass_UT.sum(-1)
        wrong_U = ~((total_U <= 1 + ROUNDING) & (mass_UT.min(-1) >= 0))  # NaN too
        if wrong_U.any():
            unit = int(np.argmax(wrong_U))
            layer, head = self.header.place_U[unit]
            raise InputError(
                f"{self._name(number, layer)}: probabilities of KV head {head} must be at least 0 and add up "
                f"to 1 at most, got a sum of {total_U[unit]:g}"
            )

    def _first(self, Q: int, T: int, done: int) -> int:
        # the row of step `done` in a pass; rows before it are the prompt's, or an earlier pass had them
        return max(0, self._tokens.prompt_tokens - 1 + done - (T - Q))

    def _read(self, number: int, layer: int, done: int) -> tuple[Array, Shape]:
        # the queries from step `done` on, and the shape of the whole tensor
        shape: Shape = ()

        def wanted(tensor: Any) -> Any:
            nonlocal shape
            shape = np.shape(tensor)
            if len(shape) != DIMENSIONS:
                return tensor  # `array` refuses it
            _, _, Q, T = shape
            return tensor[:, :, self._first(Q, T, done) :]

        tensor = self._arrays.array(f"attention.{number}.{layer}", "f", (DIMENSIONS,), wanted)
        if shape[0] != 1 or 0 in shape:
            raise InputError(
                f"{self._name(number, layer)} must be [1, heads, queries, tokens] of one request, got {list(shape)}"
            )
        return tensor, shape

    def _size(self, number: int, shapes: Sequence[Shape]) -> tuple[int, int]:
        Q, T = shapes[0][2:]
        for layer, shape in zip(self._passes[number], shapes, strict=True):
            if shape != (1, self._query_heads, Q, T) or Q > T:
                raise InputError(
                    f"{self._name(number, layer)} must be [1, {self._query_heads}, {Q}, {max(Q, T)}] as "
                    f"other layers, got {list(shape)}; leave out layers with a sliding window"
                )
        return Q, T

    def _name(self, number: int, layer: int) -> str:
        return f"attention.{number}.{layer} of {self._arrays.path}"


def _passes(arrays: Arrays) -> list[list[int]]:
    # the layers of each pass
    layers_of: dict[int, list[int]] = {}
    for match in filter(None, map(NAME.fullmatch, arrays.names)):
        layers_of.setdefault(int(match[1]), []).append(int(match[2]))
    missing = sorted(set(range(len(layers_of))) - layers_of.keys())
    if missing:
        raise InputError(f"attention of {arrays.path} must have pass {missing[0]}, got {sorted(layers_of)}")
    passes = [sorted(layers_of[number]) for number in range(len(layers_of))]
    for number, layers in enumerate(passes):
        if layers != passes[0]:
            raise InputError(
                f"attention of {arrays.path} must have the layers {passes[0]} in every pass, got {layers} in "
                f"pass {number}"
            )
    return passes


def has_attention(names: tuple[str, ...]) -> bool:
    """Say whether a file has attention tensors."""
    return any(NAME.fullmatch(name) for name in names)
