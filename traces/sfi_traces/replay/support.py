"""Recorded supports as arrays, read once and replayed often.

Dimensions: N steps from step 0 on, U audited pairs of a layer and a KV head, K recorded positions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.overlap import padded
from sfi_traces.read.reader import Trace

STEPS = ["request", "step", "token_id", "trigger", "context_tokens"]
SUPPORTS = ["request", "step", "layer", "head", "positions", "mass"]
NO_POSITION = -1
NO_TOKEN = -1  # a redacted token that is no trigger

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Supports:
    """One request's recorded supports.

    Attributes:
        model: The manifest's `model`.
        top: Most positions of a support.
        tokens: Generated ids x_0, x_1, ...; in a redacted trace the first trigger's id for any trigger.
        length_N: Cached tokens at each step, the query's own included.
        position_NUK: Positions, ascending, padded with -1; int32.
        mass_NUK: Their probabilities under dense attention; 0 where padded, and without `masses`.
        masses: Whether the probabilities are known; an import may lack them.
    """

    request: int
    model: dict[str, Any]
    top: int
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
        *,
        gaps: bool = False,
    ) -> list[Self]:
        """Read the supports of one request, or of all; optionally of some layers and KV heads.

        Layers that the run left dense are left out. A request ends with its last wholly recorded step. `gaps`
        accepts an audit that skips steps, which then have no positions.

        Raises:
            TraceError: No audit, or one that skips steps.
            ConfigError: No such request, layer or head.
        """
        trace.require_audit(every_step=not gaps)
        steps = _chosen(trace.table("steps", STEPS), request=request)
        table = _chosen(
            trace.table("supports", SUPPORTS), request=request, layer=layers, head=heads
        )
        dense = trace.manifest["config"]["dense_layers"]
        table = table.filter(~pc.field("layer").isin(pa.array(dense, pa.int16())))
        pair_U, unit = np.unique(
            np.stack([table[name].to_numpy() for name in ("layer", "head")]).astype(np.int64),
            axis=1,
            return_inverse=True,
        )
        table = table.append_column("unit", pa.array(unit.ravel()))
        found = []
        for index in pc.unique(steps["request"]).sort().to_pylist():
            own, rows = of_request(steps, index).sort_by("step"), of_request(table, index)
            found.append(cls._of(trace, index, own, rows, pair_U, gaps=gaps))
        found = [one for one in found if one.steps and len(one.layer_U)]
        if not found:
            raise TraceError(
                f"trace {trace.path} has no audited step of a layer that fast steps change"
            )
        return found

    @property
    def steps(self) -> int:
        """Recorded steps, step 0 included."""
        return len(self.length_N)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.length_N[0])

    def without(self, layers: Collection[int]) -> Self:
        """Return the supports without some layers."""
        kept_U = ~np.isin(self.layer_U, list(layers))
        return replace(
            self,
            layer_U=self.layer_U[kept_U],
            head_U=self.head_U[kept_U],
            position_NUK=self.position_NUK[:, kept_U],
            mass_NUK=self.mass_NUK[:, kept_U],
        )

    def first(self, steps: int) -> Self:
        """Return the first steps only."""
        return replace(
            self,
            tokens=self.tokens[:steps],
            length_N=self.length_N[:steps],
            position_NUK=self.position_NUK[:steps],
            mass_NUK=self.mass_NUK[:steps],
        )

    def since(self, step: int) -> Self:
        """Return the steps from `step` on, as if the prompt had ended there."""
        return replace(
            self,
            tokens=self.tokens[step:],
            length_N=self.length_N[step:],
            position_NUK=self.position_NUK[step:],
            mass_NUK=self.mass_NUK[step:],
        )

    @classmethod
    def _of(
        cls,
        trace: Trace,
        request: int,
        steps: pa.Table,
        rows: pa.Table,
        pair_U: Ints,
        *,
        gaps: bool,
    ) -> Self:
        N, U = steps.num_rows, pair_U.shape[1]
        step = rows["step"].to_numpy()
        if not gaps:  # a step whose part was never written ends the request
            short = np.bincount(step, minlength=N)[:N] < U
            N = int(np.argmax(short)) if short.any() else N
        kept = step < N
        place = (step[kept], rows["unit"].to_numpy()[kept])
        rows = rows.filter(pa.array(kept))
        K = pc.max(pc.list_value_length(rows["positions"])).as_py() or 0
        return cls(
            request=request,
            model=trace.manifest["model"],
            top=trace.manifest["audit"]["top"],
            tokens=_tokens(trace, steps)[:N],
            length_N=steps["context_tokens"].to_numpy().astype(np.int64)[:N],
            layer_U=pair_U[0],
            head_U=pair_U[1],
            position_NUK=_placed(rows["positions"], place, (N, U, K), NO_POSITION),
            mass_NUK=_placed(rows["mass"], place, (N, U, K), 0.0)
            if not rows["mass"].null_count
            else np.broadcast_to(np.float32(0), (N, U, K)),
            masses=not rows["mass"].null_count,
        )


def of_request(table: pa.Table, request: int) -> pa.Table:
    """Return a request's rows; maybe none."""
    return table.filter(pc.field("request") == request)


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


def check_known(name: str, values: Collection[int], known: Collection[int]) -> None:
    """Raise `ConfigError` for a value that a trace does not have."""
    for value in values:
        if value not in known:
            raise ConfigError(f"{name} must be one of {_ranges(known)}, got {value}")


def _ranges(values: Collection[int]) -> Sequence[int] | str:
    ordered = sorted(values)
    whole = bool(ordered) and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]} to {ordered[-1]}" if whole else ordered


def _tokens(trace: Trace, steps: pa.Table) -> list[int]:
    ids = steps["token_id"]
    if ids.null_count == 0:
        return list(ids.to_pylist())
    first = next(iter(trace.manifest["trigger_token_ids"]), NO_TOKEN)
    return [first if trigger else NO_TOKEN for trigger in steps["trigger"].to_pylist()]


def _placed(
    lists: pa.ChunkedArray, place: tuple[Any, Any], shape: tuple[int, int, int], empty: float
) -> npt.NDArray[Any]:
    rows = padded(lists, empty, shape[2])
    out = np.full(shape, empty, rows.dtype)
    out[place] = rows
    return out
