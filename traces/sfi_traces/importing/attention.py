"""Imports transformers' attention: for each pass and layer a tensor [1, H, Q, T] (docs/import.md)."""

from collections.abc import Iterator

import numpy as np

from sfi_core.errors import InputError
from sfi_core.settings.engine import AuditConfig
from sfi_traces.importing.arrays import Arrays, ImportedStep, Tokens, plain, readable
from sfi_traces.importing.selections import MASSES, wrong_masses
from sfi_traces.overlap import Array

DIMENSIONS = 4  # request, head, query, token


class AttentionArrays:
    """The steps of a file of attention probabilities, one forward pass after the other; else as `SelectionArrays`.

    A pass with Q queries and T cached tokens has the queries of positions T - Q to T - 1. Step t is the query
    at position P - 1 + t; earlier queries are the prompt's and are skipped.
    """

    kind, masses = "attention", True
    block_size: int | None = None

    def __init__(self, arrays: Arrays, top: int | None) -> None:
        """Read all but the attention; raises `InputError` for an array that is missing or does not fit."""
        arrays.check_names("kv_heads")
        self._path, self._passes, self._top = arrays.path, arrays.passes, top or AuditConfig().top
        self.tokens = Tokens.of(arrays)
        self.query_heads = self._shape(0, 0)[1]
        self._kv_heads = arrays.number("kv_heads") or self.query_heads
        if self.query_heads % self._kv_heads:
            raise InputError(
                f"kv_heads of {self._path} must divide the {self.query_heads} query heads, got {self._kv_heads}"
            )
        layers = len(self._passes[0])
        self.place_U = [(layer, head) for layer in range(layers) for head in range(self._kv_heads)]
        for number, tensors in enumerate(self._passes):
            if len(tensors) != layers:
                raise InputError(
                    f"attentions of {self._path} must have {layers} layers in every pass, got {len(tensors)} in "
                    f"pass {number}"
                )

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; one pass at a time is in memory. Raises `InputError` for a faulty one."""
        begin, N, done = self.tokens.prompt_tokens - 1, len(self.tokens.token_ids), 0
        where = f"attention of {self._path}"
        for number in range(len(self._passes)):
            tensors, first = self._pass(number, begin + done)
            for row in range(tensors[0].shape[2]):
                position = first + row
                if position - begin == done == N:  # the query of the last token, which generated none
                    break
                if position - begin != done:
                    raise InputError(
                        f"{where} must have step {done:,}, the query at position {begin + done:,}, got pass {number} "
                        f"at {position:,}"
                    )
                yield self._step(number, [tensor[0, :, row, : position + 1] for tensor in tensors])
                done += 1
            if done == N and number + 1 < len(self._passes):
                raise InputError(f"{where} must end with the {N:,} steps of token_ids, got pass {number + 1}")
        if done < N:
            raise InputError(f"{where} must reach the {N:,} steps of token_ids, got {done:,}")

    def _step(self, number: int, rows: list[Array]) -> ImportedStep:
        # averages each layer's query heads for the KV heads
        means = [row.reshape(self._kv_heads, -1, row.shape[-1]).mean(1, dtype=np.float32) for row in rows]
        mass_UT = np.concatenate(means)
        if (unit := wrong_masses(mass_UT)) is not None:
            (layer, head), total = self.place_U[unit], mass_UT[unit].sum()
            where = f"{self._name(number, layer)}: probabilities of KV head {head}"
            raise InputError(f"{where} {MASSES}, got a sum of {total:g}")
        best_UK = np.sort(np.argsort(-mass_UT, axis=-1, kind="stable")[:, : self._top], axis=-1)
        mass_UK, retained_U = np.take_along_axis(mass_UT, best_UK, -1), np.ones(len(mass_UT), np.float32)
        attended, index_UK = float(mass_UT.shape[-1]), best_UK.astype(np.int32)
        return ImportedStep(index_UK=index_UK, mass_UK=mass_UK, retained_U=retained_U, attended_tokens=attended)

    def _pass(self, number: int, wanted: int) -> tuple[list[Array], int]:
        # each layer's queries from position `wanted` on, and the first one's position: an earlier pass had those before
        tensors: list[Array] = []
        _, _, Q, T = self._shape(number, 0)
        first = max(T - Q, wanted)
        for layer, tensor in enumerate(self._passes[number]):
            shape = self._shape(number, layer)
            if shape != (1, self.query_heads, Q, T) or Q > T:
                raise InputError(
                    f"{self._name(number, layer)} must be [1, {self.query_heads}, {Q}, {max(Q, T)}] as "
                    f"other layers, got {list(shape)}; leave out layers with a sliding window"
                )
            with readable(self._path):
                tensors.append(plain(tensor[:, :, first - (T - Q) :]))
        return tensors, first

    def _shape(self, number: int, layer: int) -> tuple[int, ...]:
        tensor = self._passes[number][layer]
        shape = tuple(tensor.shape)
        if len(shape) != DIMENSIONS or shape[0] != 1 or 0 in shape or not tensor.is_floating_point():
            raise InputError(
                f"{self._name(number, layer)} must be numbers, [1, heads, queries, tokens] of one request, got "
                f"{tensor.dtype}, {list(shape)}"
            )
        return shape

    def _name(self, number: int, layer: int) -> str:
        return f"attention.{number}.{layer} of {self._path}"
