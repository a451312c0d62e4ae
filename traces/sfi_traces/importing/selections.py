"""Imports selections from one array, `positions` or `blocks`: [N, L, K] for all heads, or [N, L, H, K]."""

from collections.abc import Callable, Iterator

import numpy as np

from sfi_core.errors import ConfigError, InputError
from sfi_traces.importing.arrays import COMMON, Arrays, Header, ImportedStep, Tokens
from sfi_traces.overlap import Array, Floats, Ints

NAMES = ("positions", "blocks", "block_size", "layers", "mass", "scores")
WITH_HEADS = ("steps", "layers", "heads", "positions")
LAYERS = 2**15  # most layers of a trace
PADDING = -1  # fills up the positions or blocks of shorter selections
MOST_POSITIONS = 1 << 26  # of the blocks of a step
LAST = np.iinfo(np.int64).max  # sorts padding behind the positions
ROUNDING = 0.01  # a row of bfloat16 probabilities may add up to so much more than 1

Where = Callable[[int], str]  # names the row of a layer and head, by its index


class SelectionArrays:
    """The steps of a file with one array of selections; `header` is what is known before they are read."""

    def __init__(self, arrays: Arrays, top: int | None, kv_heads: int | None) -> None:
        """Read the arrays; `top` and `kv_heads` as in `import_trace`.

        Raises `InputError` for an array that is missing or whose shape contradicts the others, `ConfigError` for an
        option that does not fit the file.
        """
        arrays.check_names(arrays.names, (*COMMON, *NAMES))
        if kv_heads is not None:
            raise ConfigError("kv-heads is for attention tensors, got selections")
        self._path, self._top = arrays.path, top
        self._name = _one_of(arrays, "positions", "blocks")
        self._block_size = self._checked_block_size(arrays)
        self._index = arrays.array(self._name, "iu", (3, 4))
        self._mass, self._scores = (self._beside(arrays, name) for name in ("mass", "scores"))
        if top is not None and self._mass is None and self._scores is None:
            got = "neither" if self._block_size is None else "blocks"
            raise ConfigError(f"top needs positions with mass or scores, got {got}")
        if 0 in self._index.shape:
            raise InputError(
                f"{self._name} of {self._path} must have steps, layers and positions, got shape "
                f"{list(self._index.shape)}"
            )
        self._tokens = Tokens.of(arrays)
        steps, tokens = len(self._index), len(self._tokens.token_ids)
        if tokens != steps:
            raise InputError(f"token_ids of {arrays.path} must be {steps:,}, one for each step, got {tokens:,}")
        heads = self._heads or 1
        self.header = Header(
            kind="selections",
            tokens=self._tokens,
            place_U=[(layer, head) for layer in self._layers(arrays) for head in range(heads)],
            query_heads=heads,
            masses=self._mass is not None,
            block_size=self._block_size,
        )

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; raises `InputError`, which names the faulty row."""
        for step in range(len(self._index)):
            index_UK, mass_UK, score_UK = (
                None if array is None else np.asarray(array[step]).reshape(-1, array.shape[-1])
                for array in (self._index, self._mass, self._scores)
            )
            assert index_UK is not None, "the file has positions or blocks"
            yield self._step(step, index_UK, mass_UK, score_UK)

    def _step(self, step: int, index_UK: Ints, mass_UK: Floats | None, score_UK: Floats | None) -> ImportedStep:
        # sorts positions or blocks, given in any order and padded with -1; keeps the best `top` if that is given
        length, where = self._tokens.prompt_tokens + step, self._where(step)
        if self._block_size is not None:
            block_UB, _ = _sorted_positions(index_UK, -(-length // self._block_size), where, "block")
            index_UK = _positions_of_blocks(block_UB, self._block_size, length)
        else:
            index_UK, order_UK = _sorted_positions(index_UK, length, where)
            mass_UK, score_UK = (
                None if given is None else np.take_along_axis(given, order_UK, -1) for given in (mass_UK, score_UK)
            )
        if mass_UK is not None:
            mass_UK = _checked_mass(mass_UK, index_UK, where)
        ranks_UK = score_UK if mass_UK is None else mass_UK
        if self._top is not None and ranks_UK is not None:
            best_UK = strongest(ranks_UK, index_UK, self._top)
            index_UK = np.take_along_axis(index_UK, best_UK, -1)
            mass_UK = None if mass_UK is None else np.take_along_axis(mass_UK, best_UK, -1)
        return ImportedStep(
            index_UK=index_UK,
            mass_UK=mass_UK,
            retained_U=None if mass_UK is None else np.minimum(mass_UK.sum(-1), 1),
            attended_tokens=float((index_UK >= 0).sum(-1).mean()),
        )

    def _checked_block_size(self, arrays: Arrays) -> int | None:
        block_size = arrays.number("block_size", least=1)
        if (block_size is not None) != (self._name == "blocks"):
            got = f"{'none' if block_size is None else block_size} with {self._name}"
            raise InputError(f"block_size of {self._path} must come with blocks, got {got}")
        return block_size

    @property
    def _heads(self) -> int | None:
        # None for [N, L, K], one selection for all heads
        *_, heads, _ = self._index.shape[1:]
        return int(heads) if self._index.ndim == len(WITH_HEADS) else None

    def _beside(self, arrays: Arrays, name: str) -> Array | None:
        array = arrays.maybe(name, "f", (3, 4))
        if array is None:
            return None
        if self._name == "blocks":
            raise InputError(f"{name} of {self._path} must be of positions, got blocks")
        if array.shape != self._index.shape:
            raise InputError(
                f"{name} of {self._path} must be {list(self._index.shape)} as {self._name}, got {list(array.shape)}"
            )
        return array

    def _layers(self, arrays: Arrays) -> list[int]:
        count = self._index.shape[1]
        given = arrays.maybe("layers", "iu", (1,))
        layers = list(range(count)) if given is None else given.tolist()
        if len(layers) != count:
            raise InputError(f"layers of {self._path} must be {count}, as {self._name} has, got {len(layers)}")
        if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < LAYERS:
            raise InputError(f"layers of {self._path} must ascend, in 0 to {LAYERS - 1}, got {layers}")
        return layers

    def _where(self, row: int) -> Where:
        heads = self._heads

        def name(unit: int) -> str:
            place = str(unit) if heads is None else f"{unit // heads}, {unit % heads}"
            return f"{self._name}[{row}, {place}] of {self._path}"

        return name


def _one_of(arrays: Arrays, first: str, second: str) -> str:
    names = [name for name in (first, second) if name in arrays.names]
    if len(names) != 1:
        got = " and ".join(names) or "neither"
        raise InputError(f"import {arrays.path} must have {first}, {second} or attention.PASS.LAYER, got {got}")
    return names[0]


def _sorted_positions(position_UK: Ints, length: int, where: Where, what: str = "position") -> tuple[Ints, Ints]:
    """Sort each row's positions, all below `length`, padding (-1) last; return the order too.

    Raises `InputError` for a number out of range, or twice in its row; `where` names the row.
    """
    given_UK = position_UK.astype(np.int64)
    for wrong_UK, rule in (
        (given_UK < PADDING, f"must be at least 0, or {PADDING} for padding"),
        (given_UK >= length, f"must be below {length:,}, the step's {what}s"),
    ):
        if wrong_UK.any():
            unit, rank = np.argwhere(wrong_UK)[0]
            raise InputError(f"{where(int(unit))}: {what} {rule}, got {given_UK[unit, rank]:,}")
    key_UK = np.where(given_UK == PADDING, LAST, given_UK)
    order_UK = np.argsort(key_UK, axis=-1, kind="stable")
    sorted_UK = np.take_along_axis(given_UK, order_UK, -1)
    twice_UK = (sorted_UK[:, 1:] == sorted_UK[:, :-1]) & (sorted_UK[:, 1:] != PADDING)
    if twice_UK.any():
        unit, rank = np.argwhere(twice_UK)[0]
        raise InputError(f"{where(int(unit))}: {what}s must be different ones, got {sorted_UK[unit, rank]:,} twice")
    return sorted_UK.astype(np.int32), order_UK


def _checked_mass(mass_UK: Floats, index_UK: Ints, where: Where) -> Floats:
    """Return the masses as float32, 0 where padded.

    Raises `InputError` for a mass that is no probability, or a row whose sum is above 1.
    """
    known_UK = index_UK >= 0
    out_UK = np.where(known_UK, mass_UK, 0).astype(np.float32)
    wrong_UK = ~((out_UK >= 0) & (out_UK <= 1 + ROUNDING))  # NaN too
    if wrong_UK.any():
        unit, rank = np.argwhere(wrong_UK)[0]
        raise InputError(f"{where(int(unit))}: mass must be in 0 to 1, got {out_UK[unit, rank]:g}")
    total_U = out_UK.sum(-1)
    if (total_U > 1 + ROUNDING).any():
        unit = int(total_U.argmax())
        raise InputError(f"{where(unit)}: masses must add up to 1 at most, got {total_U[unit]:g}")
    return out_UK


def _positions_of_blocks(block_UB: Ints, block_size: int, length: int) -> Ints:
    """Return the cached positions of ascending blocks: [U, B * block_size], padded with -1.

    Raises `InputError` for more positions than a step can have.
    """
    size = min(block_size, length)  # a block may be longer than what is cached
    if block_UB.size * size > MOST_POSITIONS:
        raise InputError(f"blocks must be of {MOST_POSITIONS:,} positions a step at most, got {block_UB.size * size:,}")
    first_UB1 = block_UB[:, :, None].astype(np.int64) * block_size
    position_UBS = first_UB1 + np.arange(size)
    known_UBS = (block_UB[:, :, None] >= 0) & (position_UBS < length)
    # padding stays last: blocks ascend, and only the last block may be cut short
    return np.where(known_UBS, position_UBS, PADDING).reshape(len(block_UB), -1).astype(np.int32)


def strongest(score_UK: Floats, index_UK: Ints, top: int) -> Ints:
    """Return the indices of each row's `top` best positions, ascending; the first of equal ones."""
    score_UK = np.where(index_UK >= 0, score_UK, -np.inf)
    best_UK = np.argsort(-score_UK, axis=-1, kind="stable")[:, :top]
    return np.sort(best_UK, axis=-1)
