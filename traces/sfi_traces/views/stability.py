"""Support stability: how much the oracle supports of different steps overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.read.reader import Trace
from sfi_traces.read.shares import even_shares

MOST_STEPS = 1024  # steps whose pairs are counted at once
MOST_POSITIONS = 1 << 25  # in memory at once; a quarter of a GB, and its copies
MOST_LAG = 128
BLOCK = 64  # steps of a block
SPREAD = (0.1, 0.9)  # quantiles of a band

Place = tuple[int, int]  # layer, KV head


@dataclass(frozen=True)
class ViewSupports:
    """The supports of one request, by layer and KV head.

    Attributes:
        step: Audited steps, ascending; steps that lack a layer or head are left out.
        sets: Positions of each step's support, ascending, by layer and KV head.
        mass: The positions' probabilities.
    """

    step: np.ndarray
    sets: dict[Place, list[np.ndarray]]
    mass: dict[Place, list[np.ndarray]]

    @classmethod
    def read(
        cls,
        trace: Trace,
        request: int,
        last_step: int,
        layer: int | None = None,
        head: int | None = None,
    ) -> "ViewSupports":
        """Read the supports of a request up to `last_step`, of all layers and heads unless one is given.

        Takes 8 bytes of memory for each recorded position, and twice that for a moment. Beyond
        `MOST_POSITIONS` positions, every n-th layer is read.

        Raises:
            TraceError: There are none; names the option that records them.
        """
        trace.require_audit()
        wanted = rows_of(request, layer, head) & (pc.field("step") <= last_step)
        found = trace.rows("supports", ["layer"], wanted)["layer"]
        if not len(found):
            raise TraceError(_missing(trace, request, layer, head))
        every = thinning(len(found) * trace.manifest["audit"]["top"], MOST_POSITIONS)
        layers = pc.unique(found).sort()[::every]
        columns = ["step", "layer", "head", "positions", "mass"]
        rows = trace.rows("supports", columns, wanted & pc.field("layer").isin(layers))
        return cls.from_rows(even_shares(rows))  # an import may have no masses

    @classmethod
    def from_rows(cls, table: pa.Table) -> "ViewSupports":
        """Take at least one row of one request from the table `supports`."""
        ends = np.cumsum(pc.list_value_length(table["positions"]).to_numpy())[:-1]
        position, mass = (
            np.split(pc.list_flatten(table[name]).to_numpy(), ends)
            for name in ("positions", "mass")
        )
        rows: dict[Place, dict[int, int]] = {}
        keys = (table[name].to_pylist() for name in ("layer", "head", "step"))
        for row, (at_layer, at_head, step) in enumerate(zip(*keys, strict=True)):
            rows.setdefault((at_layer, at_head), {})[step] = row
        common = sorted(set.intersection(*(set(steps) for steps in rows.values())))
        places = sorted(rows)
        return cls(
            np.array(common),
            *({p: [each[rows[p][step]] for step in common] for p in places} for each in (position, mass)),
        )  # fmt: skip

    def at(self, index: slice) -> "ViewSupports":
        """Keep some of the steps."""
        chosen = np.arange(len(self.step))[index]
        if len(chosen) == len(self.step):
            return self  # keeps the cached overlap
        return ViewSupports(
            self.step[chosen],
            *({p: [rows[i] for i in chosen] for p, rows in each.items()} for each in (self.sets, self.mass)),
        )  # fmt: skip

    def of(self, place: Place) -> "ViewSupports":
        """Keep one layer and KV head."""
        return ViewSupports(self.step, {place: self.sets[place]}, {place: self.mass[place]})

    def strongest(self, top: int) -> "ViewSupports":
        """Keep the `top` most probable positions of each support; the first of equal ones."""
        sets: dict[Place, list[np.ndarray]] = {}
        masses: dict[Place, list[np.ndarray]] = {}
        for place, rows in self.mass.items():
            kept = [_strongest(mass, top) for mass in rows]
            sets[place] = [p[k] for p, k in zip(self.sets[place], kept, strict=True)]
            masses[place] = [mass[k] for mass, k in zip(rows, kept, strict=True)]
        return ViewSupports(self.step, sets, masses)

    def thinned(self, most: int = MOST_STEPS) -> "ViewSupports":
        """Keep every n-th step, so that at most `most` are left."""
        return self.at(slice(None, None, thinning(len(self.step), most)))

    @cached_property
    def overlap(self) -> np.ndarray:
        """Overlap coefficient of every two steps, the mean over layers and KV heads (SyncKV, Eq. 1).

        `[S, S]` float32, in the order of `step`.
        """
        total = np.zeros((len(self.step), len(self.step)), np.float32)
        for sets in self.sets.values():
            size = np.array([max(1, len(one)) for one in sets], np.float32)
            total += intersections(sets) / np.minimum(size[:, None], size)
        return total / len(self.sets)


def rows_of(request: int, layer: int | None = None, head: int | None = None) -> pc.Expression:
    """Make a filter for the rows of a request, and optionally of a layer or KV head."""
    wanted = pc.field("request") == request
    for name, value in (("layer", layer), ("head", head)):
        if value is not None:
            wanted &= pc.field(name) == value
    return wanted


def of_steps(steps: np.ndarray) -> pc.Expression:
    """Make a filter for the rows of some steps; its range lets readers skip row groups."""
    at, among = pc.field("step"), pa.array(np.unique(steps), pa.int32())
    if not len(among):
        return pc.scalar(False)
    return (at >= among[0]) & (at <= among[-1]) & at.isin(among)


def _strongest(mass: np.ndarray, top: int) -> np.ndarray | slice:
    if len(mass) <= top:
        return slice(None)
    return np.sort(np.argsort(-mass, kind="stable")[:top])


def thinning(count: int, most: int) -> int:
    """Return n such that every n-th of `count` things makes at most `most`."""
    return max(1, -(-count // most))


def _missing(trace: Trace, request: int, layer: int | None, head: int | None) -> str:
    where, option = f"request {request}", "--audit 1"
    for name, word, value in (("layer", "layer", layer), ("KV head", "head", head)):
        if value is not None:
            where += f", {name} {value}"
            option += f" --set audit.{word}s={value}"
    return f"trace {trace.path} has no supports of {where}; record it with {option}"


def color_range(overlap: np.ndarray) -> tuple[float, float]:
    """Choose a color scale: tenths around all overlaps except those of a step with itself."""
    others = overlap[~np.eye(len(overlap), dtype=bool)]
    if not len(others):
        return 0.0, 1.0
    return float(np.floor(others.min() * 10) / 10), float(np.ceil(others.max() * 10) / 10)


def intersections(sets: Sequence[np.ndarray]) -> np.ndarray:
    """Count the positions that every two sets share: [S, S] float32, exact below 2 ** 24.

    It multiplies the membership matrix with itself, block by block, over the positions in both blocks only:
    supports drift, so distant blocks share few.
    """
    end = 1 + max(int(one.max(initial=0)) for one in sets)
    blocks = [_Block.of(sets[at : at + BLOCK], end) for at in range(0, len(sets), BLOCK)]
    counts = np.zeros((len(sets), len(sets)), np.float32)
    for first, second in combinations_with_replacement(range(len(blocks)), 2):
        shared = np.flatnonzero(blocks[first].held & blocks[second].held)
        one, other = (blocks[at].members(shared) for at in (first, second))
        rows, columns = (slice(at * BLOCK, (at + 1) * BLOCK) for at in (first, second))
        counts[rows, columns] = one.T @ other
        counts[columns, rows] = counts[rows, columns].T
    return counts


@dataclass(frozen=True, slots=True)
class _Block:
    # consecutive sets
    held: np.ndarray  # whether some set holds each position
    row: np.ndarray  # of `member`, for the positions that some set holds
    member: np.ndarray  # which of the sets hold a position

    @classmethod
    def of(cls, sets: Sequence[np.ndarray], end: int) -> "_Block":
        position = np.concatenate(sets)
        held = np.zeros(end, bool)
        held[position] = True
        row = np.cumsum(held) - 1
        member = np.zeros((int(held.sum()), len(sets)), bool)
        member[row[position], np.repeat(np.arange(len(sets)), [len(one) for one in sets])] = True
        return cls(held, row, member)

    def members(self, position: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.member[self.row[position]].astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class LagLine:
    """Overlap of pairs of steps by their distance.

    Attributes:
        name: Name of the kind of pairs.
        lag: Distances in steps that occur, ascending.
        mean: Mean overlap of the pairs.
        low: The pairs' 10 % quantile.
        high: The pairs' 90 % quantile.
        pairs: Number of pairs.
    """

    name: str
    lag: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: np.ndarray

    @property
    def overall(self) -> float:
        """Mean overlap of all pairs; NaN where there is none."""
        pairs = self.pairs.sum()
        return float((self.mean * self.pairs).sum() / pairs) if pairs else float("nan")


def overlap_by_lag(
    supports: ViewSupports, sentence: np.ndarray, most: int = MOST_LAG
) -> tuple[LagLine, LagLine]:
    """Sort pairs of steps by lag, up to `most`: first within a sentence, then across a boundary.

    A pair's overlap is the mean over layers and KV heads; `sentence` has each step's sentence.
    """
    pieces = []
    # stretches overlap by `most` steps, so that each pair lies within one
    for begin in range(0, len(supports.step), MOST_STEPS):
        part = supports.at(slice(begin, begin + MOST_STEPS + most))
        lag = part.step[None] - part.step[:, None]
        wanted = (lag > 0) & (lag <= most)
        wanted[MOST_STEPS:] = False  # their pairs come with the next stretch
        inside = sentence[begin : begin + MOST_STEPS + most]
        same = inside[None] == inside[:, None]
        pieces.append((part.overlap[wanted], lag[wanted], same[wanted]))
    value, lag, same = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return (
        _line("within a sentence", value[same], lag[same]),
        _line("across a boundary", value[~same], lag[~same]),
    )


def _line(name: str, value: np.ndarray, lag: np.ndarray) -> LagLine:
    order = np.argsort(lag, kind="stable")
    value, lag = value[order].astype(np.float64), lag[order]
    lags, first, pairs = np.unique(lag, return_index=True, return_counts=True)
    groups = np.split(value, first[1:]) if len(lags) else []
    low, high = (np.array([np.quantile(group, share) for group in groups]) for share in SPREAD)
    return LagLine(name, lags, np.array([group.mean() for group in groups]), low, high, pairs)
