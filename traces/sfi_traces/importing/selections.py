"""Imports selections from one array, `positions` or `blocks`: [N, L, K] for all heads, or [N, L, H, K]."""

from collections.abc import Iterator

import numpy as np

from sfi_core.errors import InputError
from sfi_traces.importing.arrays import Arrays, ImportedStep, Tokens
from sfi_traces.overlap import Floats, Ints
from sfi_traces.schema import MOST_LAYERS

NAMES = ("positions", "blocks", "block_size", "layers", "mass")
WITH_HEADS = ("steps", "layers", "heads", "positions")
PADDING = -1  # fills up the positions or blocks of shorter selections
MOST_POSITIONS = 1 << 26  # of the blocks of a step
LAST = np.iinfo(np.int64).max  # sorts padding behind the positions
ROUNDING = 0.01  # a row of bfloat16 probabilities may add up to so much more than 1
MASSES = "must be at least 0 and add up to 1 at most"


class SelectionArrays:
    """The steps of a file with one array of selections.

    Attributes:
        kind: What the file has.
        place_U: The layers and heads, ascending.
        query_heads: Query heads of a layer; of selections, the heads.
        masses: Whether the positions have their probability under dense attention.
        block_size: Positions of a block; None for positions.
    """

    kind = "selections"

    def __init__(self, arrays: Arrays) -> None:
        """Read the arrays; raises `InputError` for one that is missing or whose shape contradicts the others."""
        arrays.check_names(*NAMES)
        names = [name for name in ("positions", "blocks") if name in arrays.values]
        if len(names) != 1:
            got = " and ".join(names) or "neither"
            raise InputError(f"import {arrays.path} must have positions or blocks, got {got}")
        (self._name,), self._path = names, arrays.path
        self.block_size = arrays.number("block_size")
        if (self.block_size is not None) != (self._name == "blocks"):
            got = f"{self.block_size or 'none'} with {self._name}"
            raise InputError(f"block_size of {self._path} must come with blocks, got {got}")
        self._index = index = arrays.array(self._name, "iu", (3, 4))
        if 0 in index.shape:
            raise InputError(
                f"{self._name} of {self._path} must have steps, layers and positions, got shape {list(index.shape)}"
            )
        self._mass = arrays.maybe("mass", "f", (3, 4))
        self.masses = self._mass is not None
        if self._mass is not None and (self._name == "blocks" or self._mass.shape != index.shape):
            got = "blocks" if self._name == "blocks" else str(list(self._mass.shape))
            raise InputError(f"mass of {self._path} must be {list(index.shape)} as positions, got {got}")
        self.tokens = Tokens.of(arrays)
        if len(self.tokens.token_ids) != len(index):
            got = f"{len(self.tokens.token_ids):,}"
            raise InputError(f"token_ids of {self._path} must be {len(index):,}, one for each step, got {got}")
        self._heads = index.shape[2] if index.ndim == len(WITH_HEADS) else None  # None: one selection for all heads
        self.query_heads = self._heads or 1
        self.place_U = [(layer, head) for layer in self._layers(arrays) for head in range(self.query_heads)]

    def _layers(self, arrays: Arrays) -> list[int]:
        count, given = self._index.shape[1], arrays.maybe("layers", "iu", (1,))
        layers = list(range(count)) if given is None else given.tolist()
        if len(layers) != count:
            raise InputError(f"layers of {self._path} must be {count}, as {self._name} has, got {len(layers)}")
        if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < MOST_LAYERS:
            raise InputError(f"layers of {self._path} must ascend, in 0 to {MOST_LAYERS - 1}, got {layers}")
        return layers

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; raises `InputError`, which names the faulty row."""
        for step, index in enumerate(self._index):
            index_UK, length = index.reshape(-1, index.shape[-1]), self.tokens.prompt_tokens + step
            mass_UK = None
            if self.block_size is not None:
                block_UB, _ = self._sorted(step, index_UK, -(-length // self.block_size), "block")
                index_UK = _positions_of_blocks(block_UB, self.block_size, length)
            else:
                index_UK, order_UK = self._sorted(step, index_UK, length, "position")
                if self._mass is not None:
                    given_UK = np.asarray(self._mass[step]).reshape(index_UK.shape)
                    sorted_UK = np.take_along_axis(given_UK, order_UK, -1)
                    mass_UK = np.where(index_UK >= 0, sorted_UK, 0).astype(np.float32)
                    if (unit := wrong_masses(mass_UK)) is not None:
                        raise self._refused(step, unit, f"masses {MASSES}, got a sum of {mass_UK[unit].sum():g}")
            retained_U = None if mass_UK is None else np.minimum(mass_UK.sum(-1), 1)
            attended = float((index_UK >= 0).sum(-1).mean())
            yield ImportedStep(index_UK=index_UK, mass_UK=mass_UK, retained_U=retained_U, attended_tokens=attended)

    def _refused(self, step: int, unit: int, words: str) -> InputError:
        # the error that names the row of a layer and head
        place = str(unit) if self._heads is None else f"{unit // self._heads}, {unit % self._heads}"
        return InputError(f"{self._name}[{step}, {place}] of {self._path}: {words}")

    def _sorted(self, step: int, position_UK: Ints, length: int, what: str) -> tuple[Ints, Ints]:
        # each row's positions or blocks, all below `length`, ascending, padding last; and the order
        given_UK = position_UK.astype(np.int64)
        wrong_UK = (given_UK < PADDING) | (given_UK >= length)
        if wrong_UK.any():
            unit, rank = np.argwhere(wrong_UK)[0]
            words = f"{what} must be in 0 to {length - 1:,}, or {PADDING} for padding, got {given_UK[unit, rank]:,}"
            raise self._refused(step, int(unit), words)
        order_UK = np.argsort(np.where(given_UK == PADDING, LAST, given_UK), axis=-1, kind="stable")
        sorted_UK = np.take_along_axis(given_UK, order_UK, -1)
        twice_UK = (sorted_UK[:, 1:] == sorted_UK[:, :-1]) & (sorted_UK[:, 1:] != PADDING)
        if twice_UK.any():
            unit, rank = np.argwhere(twice_UK)[0]
            words = f"{what}s must be different ones, got {sorted_UK[unit, rank]:,} twice"
            raise self._refused(step, int(unit), words)
        return sorted_UK.astype(np.int32), order_UK


def wrong_masses(mass_UK: Floats) -> int | None:
    """Find the first row whose probabilities break `MASSES`."""
    wrong_U = ~((mass_UK.sum(-1) <= 1 + ROUNDING) & (mass_UK.min(-1) >= 0))  # NaN too
    return int(wrong_U.argmax()) if wrong_U.any() else None


def _positions_of_blocks(block_UB: Ints, block_size: int, length: int) -> Ints:
    # cached positions of ascending blocks: [U, B * block_size], padded with -1
    size = min(block_size, length)  # a block may be longer than what is cached
    if block_UB.size * size > MOST_POSITIONS:
        raise InputError(f"blocks must be of {MOST_POSITIONS:,} positions a step at most, got {block_UB.size * size:,}")
    first_UB1 = block_UB[:, :, None].astype(np.int64) * block_size
    position_UBS = first_UB1 + np.arange(size)
    known_UBS = (block_UB[:, :, None] >= 0) & (position_UBS < length)
    # padding stays last: blocks ascend, and only the last block may be cut short
    return np.where(known_UBS, position_UBS, PADDING).reshape(len(block_UB), -1).astype(np.int32)
