"""The supports of a request as arrays: N steps, U layers x KV heads, K positions of the largest support."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.steps import Floats, Ints, Positions, Steps
from sfi_traces.model.trace import Place, Trace, check_known, rows_of
from sfi_traces.overlap import coefficients, padded

MOST_POSITIONS = 1 << 25  # in memory at once; a quarter of a GB, and its copies
MOST_STEPS = 1024  # steps whose pairs are counted at once
PLACED = 4096  # supports placed into the arrays at once
COLUMNS = ["step", "layer", "head", "positions", "mass"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Supports:
    """Supports of one request, of steps that have one in every layer and KV head.

    Attributes:
        model: The manifest's `model`.
        top: Most positions of a support.
        step_N: The steps, ascending; `tokens` are their generated ids, see `Steps.token`.
        length_N: Cached tokens at each step, the query's own included.
        position_NUK: Positions, ascending, padded with -1; int32.
        mass_NUK: Their probabilities under dense attention, 0 where padded; even ones without `masses`.
        masses: Whether the probabilities are known; an import may lack them.
    """

    request: int
    model: dict[str, Any]
    top: int
    step_N: Ints
    tokens: list[int]
    length_N: Ints
    layer_U: Ints
    head_U: Ints
    position_NUK: Positions
    mass_NUK: Floats
    masses: bool = True

    @classmethod
    def load(
        cls,
        trace: Trace,
        request: int | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
    ) -> list[Self]:
        """Read the supports of one request, or of all, for a replay; None for all layers that fast steps change.

        A request ends with its last wholly recorded step. Raises `TraceError` without an audit of every step,
        `ConfigError` for a request, layer or head that the trace lacks.
        """
        trace.require_audit(every_step=True)
        steps = _chosen(trace.table("steps"), request=request)
        table = trace.table("supports", ["request", *COLUMNS])
        table = _chosen(table, request=request, layer=layers, head=heads)
        dense = trace.manifest["config"]["dense_layers"]
        table = table.filter(~pc.field("layer").isin(pa.array(dense, pa.int16())))
        place_U = np.unique(_places(table))
        loaded = []
        for index in pc.unique(steps["request"]).sort().to_pylist():
            of_index = Steps.of(steps.filter(rows_of(index)).sort_by("step"), trace.manifest)
            supports = cls.of(trace.manifest, index, of_index, table.filter(rows_of(index)), place_U)
            gap = supports.step_N != np.arange(supports.steps)  # a step whose part was never written
            loaded.append(supports.at(slice(int(np.argmax(gap)))) if gap.any() else supports)
        loaded = [supports for supports in loaded if supports.steps and len(supports.layer_U)]
        if not loaded:
            raise TraceError(f"trace {trace.path} has no audited step of a layer that fast steps change")
        return loaded

    @classmethod
    def of(
        cls, manifest: dict[str, Any], request: int, steps: Steps, rows: pa.Table, place_U: Ints | None = None
    ) -> Self:
        """Take a request's rows of the table `supports`; `place_U` are the layers and KV heads a step must have."""
        place = _places(rows)
        place_U = np.unique(place) if place_U is None else place_U
        step, at = np.unique(rows["step"].to_numpy(), return_inverse=True)
        # a killed run may have written the supports of a step before the step
        whole = (np.bincount(at, minlength=len(step)) == len(place_U)) & (step <= steps.step[-1])
        finished = whole[at]
        rows = rows if finished.all() else rows.filter(pa.array(finished))
        row = steps.rows(step[whole])
        index = (np.cumsum(whole) - 1)[at[finished]], np.searchsorted(place_U, place[finished])
        K = pc.max(pc.list_value_length(rows["positions"])).as_py() or 0
        shape = (len(row), len(place_U), K)
        return cls(
            request=request,
            model=manifest["model"],
            top=manifest["audit"]["top"],
            step_N=step[whole].astype(np.int64),
            tokens=[steps.token[at] for at in row.tolist()],
            length_N=steps.context[row].astype(np.int64),
            layer_U=place_U >> 16,
            head_U=place_U & 0xFFFF,
            position_NUK=_placed(rows["positions"], index, shape, -1),
            mass_NUK=_placed(even_shares(rows)["mass"], index, shape, 0.0),
            masses=not rows["mass"].null_count,
        )

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.step_N)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; the first step must be step 0."""
        return int(self.length_N[0])

    @property
    def places(self) -> list[Place]:
        """The layers and KV heads."""
        return list(zip(self.layer_U.tolist(), self.head_U.tolist(), strict=True))

    @property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return sorted(set(self.layer_U.tolist()))

    def at(self, chosen: slice) -> Self:
        """Keep some of the steps."""
        rows = np.arange(self.steps)[chosen]
        if len(rows) == self.steps:
            return self  # keeps the cached overlap
        by_step = ("step_N", "tokens", "length_N", "position_NUK", "mass_NUK")
        return replace(self, **{name: getattr(self, name)[chosen] for name in by_step})

    def of_places(self, places: Collection[Place]) -> Self:
        """Keep some of the layers and KV heads."""
        among_U = [place in places for place in self.places]
        of_units = {name: getattr(self, name)[among_U] for name in ("layer_U", "head_U")}
        return replace(self, **of_units, position_NUK=self.position_NUK[:, among_U], mass_NUK=self.mass_NUK[:, among_U])

    def thinned(self, most: int = MOST_STEPS) -> Self:
        """Keep every n-th step, so that at most `most` are left."""
        return self.at(slice(None, None, thinning(self.steps, most)))

    @property
    def chance(self) -> float:
        """Overlap of two random supports: the mean share of the context that a support has."""
        return float(((self.position_NUK >= 0).sum(-1) / self.length_N[:, None]).mean())

    @cached_property
    def overlap(self) -> Floats:
        """Mean overlap of every two steps over layers and KV heads, [N, N] (SyncKV, Eq. 1)."""
        total = np.zeros((self.steps, self.steps), np.float32)
        for unit in range(len(self.layer_U)):
            total += coefficients(self.position_NUK[:, unit])
        return np.asarray(total / len(self.layer_U), np.float32)


def even_shares(supports: pa.Table) -> pa.Table:
    """Give the positions of rows of `supports` without masses even shares; known masses stay."""
    if not supports["mass"].null_count:
        return supports
    size = pc.list_value_length(supports["positions"])
    even = np.repeat(1 / np.maximum(1, size.to_numpy()), size.to_numpy()).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(size.to_numpy())]).astype(np.int32)
    lists = pa.chunked_array([pa.ListArray.from_arrays(offsets, pa.array(even))])
    known = pc.coalesce(supports["mass"], lists)
    return supports.set_column(supports.column_names.index("mass"), "mass", known)


def thinning(count: int, most: int) -> int:
    """Return n such that every n-th of `count` things makes at most `most`."""
    return max(1, -(-count // most))


def _chosen(table: pa.Table, **wanted: int | Collection[int] | None) -> pa.Table:
    # rows whose columns have one of the wanted values; None for all
    for column, one_or_more in wanted.items():
        if one_or_more is None:
            continue
        values = [one_or_more] if isinstance(one_or_more, int) else sorted(one_or_more)
        check_known(column, values, set(pc.unique(table[column]).to_pylist()))
        kind = table.schema.field(column).type
        table = table.filter(pc.field(column).isin(pa.array(values, kind)))
    return table


def _places(rows: pa.Table) -> Ints:
    layer, head = (rows[name].to_numpy() for name in ("layer", "head"))
    return np.asarray(layer.astype(np.int64) << 16 | head)


def _placed(
    lists: pa.ChunkedArray, index: tuple[Any, Any], shape: tuple[int, int, int], empty: float
) -> npt.NDArray[Any]:
    out = np.full(shape, empty, lists.type.value_type.to_pandas_dtype())
    for at in range(0, len(lists), PLACED):  # not all at once, for the memory's sake
        rows = slice(at, at + PLACED)
        out[index[0][rows], index[1][rows]] = padded(lists.slice(at, PLACED), empty, shape[2])
    return out
