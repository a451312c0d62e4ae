"""Imports selections from one array, `positions` or `blocks`: [N, L, K] for all heads, or [N, L, H, K]."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sfi_core.errors import ConfigError, InputError
from sfi_traces.importing.arrays import Arrays, Tokens
from sfi_traces.importing.checks import Where, checked_mass, positions_of_blocks, sorted_positions, strongest
from sfi_traces.importing.schema import COMMON, LAYERS, SELECTIONS, ImportedStep, ImportOptions, check_known
from sfi_traces.overlap import Array, Floats, Ints

WITH_HEADS = ("steps", "layers", "heads", "positions")


def selected_step(
    index_UK: Ints,
    mass_UK: Floats | None,
    score_UK: Floats | None,
    *,
    block_size: int | None,
    top: int | None,
    where: Where,
    **facts: Any,
) -> ImportedStep:
    """Check a step's selection, and sort it; keep only the best `top` if that is given.

    `index_UK` has positions or blocks in any order, padded with -1, then come their probabilities and an
    indexer's scores, if known; `facts` are the step's other fields. Raises `InputError`, which names the row.
    """
    length = facts["context_tokens"]
    if block_size is not None:
        block_UB, _ = sorted_positions(index_UK, -(-length // block_size), where, "block")
        index_UK = positions_of_blocks(block_UB, block_size, length)
    else:
        index_UK, order_UK = sorted_positions(index_UK, length, where)
        mass_UK, score_UK = (
            None if given is None else np.take_along_axis(given, order_UK, -1) for given in (mass_UK, score_UK)
        )
    if mass_UK is not None:
        mass_UK = checked_mass(mass_UK, index_UK, where)
    ranks_UK = mass_UK if mass_UK is not None else score_UK
    if top is not None and ranks_UK is not None:
        best_UK = strongest(ranks_UK, index_UK, top)
        index_UK = np.take_along_axis(index_UK, best_UK, -1)
        mass_UK = None if mass_UK is None else np.take_along_axis(mass_UK, best_UK, -1)
    return ImportedStep(
        index_UK=index_UK,
        mass_UK=mass_UK,
        retained_U=None if mass_UK is None else np.minimum(mass_UK.sum(-1), 1),
        attended_tokens=float((index_UK >= 0).sum(-1).mean()),
        **facts,
    )


def check_top(top: int | None, block_size: int | None, *, ranked: bool) -> None:
    """Raise `ConfigError` for a `top` of positions that have neither mass nor scores."""
    if top is not None and (block_size is not None or not ranked):
        got = "blocks" if block_size is not None else "neither"
        raise ConfigError(f"top needs positions with mass or scores, got {got}")


def check_block_size(path: Path, block_size: int | None, name: str) -> None:
    """Raise `InputError` unless blocks, and only blocks, have a block size of at least 1."""
    if (block_size is not None) != (name == "blocks"):
        got = f"none with {name}" if block_size is None else f"{block_size} with {name}"
        raise InputError(f"block_size of {path} must come with blocks, got {got}")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size of {path} must be at least 1, got {block_size}")


class SelectionArrays:
    """The steps of a file with one array of selections; `header` is what is known before they are read."""

    def __init__(self, arrays: Arrays, options: ImportOptions) -> None:
        """Read the arrays.

        Raises `InputError` for an array that is missing or whose shape contradicts the others, `ConfigError` for an
        option that does not fit the file.
        """
        check_known(arrays.path, "array", arrays.names, (*COMMON, *SELECTIONS))
        if options.kv_heads is not None:
            raise ConfigError("kv-heads is for attention tensors, got selections")
        self._path, self._top = arrays.path, options.top
        self._name = _one_of(arrays, "positions", "blocks")
        block_size = arrays.number("block_size", least=1)
        check_block_size(self._path, block_size, self._name)
        self._index = arrays.array(self._name, "iu", (3, 4))
        self._mass, self._scores = (self._beside(arrays, name) for name in ("mass", "scores"))
        ranked = self._mass is not None or self._scores is not None
        check_top(options.top, block_size, ranked=ranked)
        if 0 in self._index.shape:
            raise InputError(
                f"{self._name} of {self._path} must have steps, layers and positions, got shape "
                f"{list(self._index.shape)}"
            )
        self._tokens = Tokens.of(arrays, len(self._index))
        heads = self._heads or 1
        self.header = self._tokens.header(
            kind="selections",
            place_U=[(layer, head) for layer in self._layers(arrays) for head in range(heads)],
            query_heads=heads,
            masses=self._mass is not None,
            block_size=block_size,
        )

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; raises `InputError`, which names the faulty row."""
        tokens = self._tokens
        for step, token_id in enumerate(tokens.token_ids.tolist()):
            index_UK, mass_UK, score_UK = (
                None if array is None else self._row(array, step) for array in (self._index, self._mass, self._scores)
            )
            assert index_UK is not None, "the file has positions or blocks"
            yield selected_step(
                index_UK, mass_UK, score_UK, block_size=self.header.block_size, top=self._top,
                where=self._where(step), request=0, step=step, token_id=token_id, row=step + 1,
                context_tokens=tokens.prompt.tokens + step,
                token_text=None if tokens.texts is None else tokens.texts[step],
            )  # fmt: skip

    @property
    def _heads(self) -> int | None:
        # None for [N, L, K], one selection for all heads
        *_, heads, _ = self._index.shape[1:]
        return int(heads) if self._index.ndim == len(WITH_HEADS) else None

    def _beside(self, arrays: Arrays, name: str) -> Array | None:
        found = arrays.maybe(name, "f", (3, 4))
        if found is None:
            return None
        if self._name == "blocks":
            raise InputError(f"{name} of {self._path} must be of positions, got blocks")
        if found.shape != self._index.shape:
            raise InputError(
                f"{name} of {self._path} must be {list(self._index.shape)} as {self._name}, got {list(found.shape)}"
            )
        return found

    def _layers(self, arrays: Arrays) -> list[int]:
        count = self._index.shape[1]
        given = arrays.maybe("layers", "iu", (1,))
        layers = list(range(count)) if given is None else given.tolist()
        if len(layers) != count:
            raise InputError(f"layers of {self._path} must be {count}, as {self._name} has, got {len(layers)}")
        if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < LAYERS:
            raise InputError(f"layers of {self._path} must ascend, in 0 to {LAYERS - 1}, got {layers}")
        return layers

    def _row(self, array: Array, row: int) -> Array:
        return np.asarray(array[row]).reshape(-1, array.shape[-1])

    def _where(self, row: int) -> Where:
        heads = self._heads

        def name(unit: int) -> str:
            place = str(unit) if heads is None else f"{unit // heads}, {unit % heads}"
            return f"{self._name}[{row}, {place}] of {self._path}"

        return name


def _one_of(arrays: Arrays, first: str, second: str) -> str:
    found = [name for name in (first, second) if name in arrays.names]
    if len(found) != 1:
        got = " and ".join(found) or "neither"
        raise InputError(f"import {arrays.path} must have {first}, {second} or attention.PASS.LAYER, got {got}")
    return found[0]
