"""Numbers of the figures that are not about the overlap of supports: lambda*, retained mass, phases."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.stability import SPREAD, Place, thinning
from sfi_traces.view import View

PHASES = (  # leaf spans, in the order in which a bar stacks them
    "attention.fast", "attention.dense", "attention.mixed", "selector", "top_k", "pack", "append", "sample",
    "audit", "rest of the step",
)  # fmt: skip
AUDIT = ("audit", "shadow")  # spans that are there because somebody looks
MOST_BARS = 2000


@dataclass(frozen=True, slots=True)
class Lambda:
    """The prior's weight lambda* over time.

    Attributes:
        step: Slow steps at which the memory was refreshed.
        median: Median over layers and KV heads.
        low: 10 % quantile.
        high: 90 % quantile.
        clips: Upper bounds that the run's config sets.
        clipped: Share of all values that stand at a bound.
        places: The layers and KV heads.
    """

    step: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    clips: tuple[float, ...]
    clipped: float
    places: list[Place]


def lambda_over_time(view: View) -> Lambda:
    """Read lambda* at each refresh.

    Raises:
        TraceError: The run had no Selector.
    """
    columns = ["request", "step", "layer", "head", "lambda_star"]
    rows = view.trace.table("selections", columns).filter(view.wanted)
    rows = rows.filter(pc.is_valid(pc.field("lambda_star"))).sort_by("step")
    if not len(rows):
        raise TraceError(
            f"trace {view.trace.path} has no lambda* of request {view.request}, recorded with policy "
            f"{view.trace.manifest['policy']}; record it with --policy sfi"
        )
    value = rows["lambda_star"].to_numpy().astype(np.float64)
    step, first = np.unique(rows["step"].to_numpy(), return_index=True)
    groups = np.split(value, first[1:])
    low, median, high = (
        np.array([np.quantile(group, share) for group in groups])
        for share in (SPREAD[0], 0.5, SPREAD[1])
    )
    settings = view.trace.manifest["config"]["selector"]
    both = {settings["lambda_clip"], settings.get("lambda_clip_rows")} - {None}
    clips = tuple(sorted(both))
    clipped = np.isclose(value[:, None], clips, rtol=1e-4).any(1).mean()
    return Lambda(step, median, low, high, clips, float(clipped), _places(rows))


@dataclass(frozen=True, slots=True)
class Retained:
    """Retained mass by layer and KV head.

    Attributes:
        layers: Rows of the map.
        heads: Columns.
        mass: `[layers, heads]`; NaN where a layer has no such head.
        steps: Audited steps that a mean is over.
        coverage: False: mass of what fast steps attended. True: there was no audited fast step, and it is the
            mass of the recorded supports instead.
        top: Positions of a support, K.
    """

    layers: list[int]
    heads: list[int]
    mass: np.ndarray
    steps: int
    coverage: bool
    top: int

    @property
    def extremes(self) -> tuple[Place, Place]:
        """Return the layers and heads with the least and the most mass."""
        least, most = np.nanargmin(self.mass), np.nanargmax(self.mass)
        ends = [np.unravel_index(at, self.mass.shape) for at in (least, most)]
        low, high = ((self.layers[row], self.heads[column]) for row, column in ends)
        return low, high


def retained_mass(view: View) -> Retained:
    """Average the retained mass over the fast audited steps, of all layers and KV heads.

    Raises:
        TraceError: No audit.
    """
    view.trace.require_audit()
    columns = ["request", "step", "layer", "head", "retained_mass"]
    table = view.trace.table("supports", [*columns, "mass"])
    table = table.filter(pc.field("request") == view.request)
    fast = pa.array(view.steps.step[~view.steps.slow])
    rows = table.filter(pc.is_in(table["step"], fast))
    coverage = not len(rows)
    if coverage:
        rows, value = table, _sums(table["mass"])
    else:
        value = rows["retained_mass"].to_numpy().astype(np.float64)
    if not len(rows):
        raise TraceError(
            f"trace {view.trace.path} has no supports of request {view.request}; record it with --audit 1"
        )
    layers, row = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    heads, column = np.unique(rows["head"].to_numpy(), return_inverse=True)
    total, count = np.zeros((2, len(layers), len(heads)))
    np.add.at(total, (row, column), value)
    np.add.at(count, (row, column), 1)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    steps = len(pc.unique(rows["step"]))
    top = view.trace.manifest["audit"]["top"]
    return Retained(layers.tolist(), heads.tolist(), mean, steps, coverage, top)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the time of each decoding step went to.

    Attributes:
        step: First step of each bar; step 0, the prefill, is left out.
        per_bar: Steps that a bar averages; 1 unless there are many.
        phases: Microseconds of each phase that took any, by name.
        slow: Slow steps.
        prefill_us: Wall time of step 0; None where it was not recorded.
        audited: Share of the steps that the audit made longer.
    """

    step: np.ndarray
    per_bar: int
    phases: dict[str, np.ndarray]
    slow: np.ndarray
    prefill_us: float | None
    audited: float


def step_phases(view: View) -> Timeline:
    """Sum the leaf spans of each decoding step by phase; the rest is the step's wall time less these.

    A batch's spans carry its first request's number.

    Raises:
        TraceError: No timings of decoding steps.
    """
    table = view.trace.table("timings", ["request", "step", "name", "elapsed_us"])
    firsts = [first for first in pc.unique(table["request"]).to_pylist() if first <= view.request]
    steps = view.steps
    later = steps.step >= 1
    if not firsts or not later.any():
        raise TraceError(f"trace {view.trace.path} has no timings of decoding steps")
    table = table.filter((pc.field("request") == max(firsts)) & (pc.field("step") >= 1))
    step, elapsed_us = steps.step[later], steps.elapsed_us[later]
    names = np.array(["audit" if n in AUDIT else n for n in table["name"].to_pylist()], object)
    at, spent_us = table["step"].to_numpy(), table["elapsed_us"].to_numpy()
    phases = {name: np.zeros(len(step)) for name in PHASES}
    for name, total in phases.items():
        chosen = (names == name) & np.isin(at, step)
        np.add.at(total, np.searchsorted(step, at[chosen]), spent_us[chosen])
    phases["rest of the step"] = np.maximum(0, elapsed_us - sum(phases.values()))
    width = thinning(len(step), MOST_BARS)
    edges = np.arange(0, len(step), width)
    counts = np.diff([*edges, len(step)])
    return Timeline(
        step=step[edges],
        per_bar=width,
        phases={
            name: np.add.reduceat(total, edges) / counts
            for name, total in phases.items()
            if total.any()
        },
        slow=step[steps.slow[later]],
        prefill_us=None if later.all() else float(steps.elapsed_us[0]),
        audited=float(steps.audited[later].mean()),
    )


def _places(rows: pa.Table) -> list[Place]:
    pairs = zip(rows["layer"].to_pylist(), rows["head"].to_pylist(), strict=True)
    return sorted(set(pairs))


def _sums(lists: pa.ChunkedArray) -> np.ndarray:
    ends = np.cumsum([0, *pc.list_value_length(lists).to_pylist()])
    running = np.cumsum([0.0, *pc.list_flatten(lists).to_numpy()])
    total: np.ndarray = running[ends[1:]] - running[ends[:-1]]
    return total
