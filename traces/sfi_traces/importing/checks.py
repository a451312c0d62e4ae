"""Checks a step's selections, of all layers and heads at once."""

from collections.abc import Callable

import numpy as np

from sfi_core.errors import InputError
from sfi_traces.importing.schema import PADDING
from sfi_traces.overlap import Floats, Ints

MOST_POSITIONS = 1 << 26  # of the blocks of a step
LAST = np.iinfo(np.int64).max  # sorts padding behind the positions
ROUNDING = 0.01  # a row of bfloat16 probabilities may add up to so much more than 1

Where = Callable[[int], str]  # names the row of a layer and head, by its index


def sorted_positions(position_UK: Ints, length: int, where: Where, what: str = "position") -> tuple[Ints, Ints]:
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


def checked_mass(mass_UK: Floats, index_UK: Ints, where: Where) -> Floats:
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


def positions_of_blocks(block_UB: Ints, block_size: int, length: int) -> Ints:
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
