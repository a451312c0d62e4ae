"""Numbers of the figures of overlap by lag, lambda*, retained mass and phases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.health.measures import AT_CLIP
from sfi_traces.model.request import Request
from sfi_traces.model.supports import MOST_STEPS, thinning
from sfi_traces.model.trace import Place, rows_of

AUDIT = ("audit", "shadow")  # spans of the audit itself
REST = "rest of the step"
PHASES = {  # innermost spans, in a bar's order, with colors visible on white and on black
    "attention.fast": "#2f7fc1",
    "attention.dense": "#d1495b",
    "attention.mixed": "#8e6bbf",
    "selector": "#e08a2e",
    "top_k": "#c9a227",
    "pack": "#3aa17e",
    "append": "#2aa5b8",
    "sample": "#b5739d",
    REST: "#bcc5cf",
}
MOST_BARS = 2000
MOST_LAG = 128
SPREAD = (0.1, 0.9)  # quantiles of a band


def color_range(overlap: np.ndarray) -> tuple[float, float]:
    """Choose a color scale: tenths around all overlaps except those of a step with itself."""
    others = overlap[~np.eye(len(overlap), dtype=bool)]
    if not len(others):
        return 0.0, 1.0
    return float(np.floor(others.min() * 10) / 10), float(np.ceil(others.max() * 10) / 10)


def axis_range(*values: np.ndarray | float) -> tuple[float, float]:
    """Choose the ends of an axis of overlaps: a little beyond all values, within 0 and 1."""
    known = np.hstack(values)
    low, high = float(known.min()), float(known.max())
    room = max(0.02, 0.06 * (high - low))
    return max(0.0, low - room), min(1.0, high + room)


@dataclass(frozen=True, slots=True)
class LagLine:
    """Overlap of pairs of steps by `lag`: mean, 10 and 90 % quantiles, number of pairs."""

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


def lag_lines(request: Request, most: int = MOST_LAG) -> tuple[LagLine, LagLine]:
    """Sort pairs of audited steps by lag, up to `most`: first within a sentence, then across a boundary.

    A pair's overlap is the mean over layers and KV heads. Raises `TraceError` for one audited step.
    """
    supports = request.supports
    if supports.steps == 1:
        raise TraceError(f"trace {request.trace.path} has one audited step, too few for an overlap")
    sentence = request.steps.sentence[request.steps.rows(supports.step_N)]
    pieces = []
    # stretches overlap by `most` steps, so that each pair lies within one
    for begin in range(0, supports.steps, MOST_STEPS):
        part = supports.at(slice(begin, begin + MOST_STEPS + most))
        lag = part.step_N[None] - part.step_N[:, None]
        wanted = (lag > 0) & (lag <= most)
        wanted[MOST_STEPS:] = False  # their pairs come with the next stretch
        inside = sentence[begin : begin + MOST_STEPS + most]
        same = inside[None] == inside[:, None]
        pieces.append((part.overlap[wanted], lag[wanted], same[wanted]))
    value, lag, same = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return (_line("within a sentence", value[same], lag[same]), _line("across a boundary", value[~same], lag[~same]))


def _line(name: str, value: np.ndarray, lag: np.ndarray) -> LagLine:
    lags, groups = _grouped(value, lag)
    low, high = (np.array([np.quantile(group, share) for group in groups]) for share in SPREAD)
    mean, pairs = np.array([group.mean() for group in groups]), np.array([len(group) for group in groups], int)
    return LagLine(name, lags, mean, low, high, pairs)


def _grouped(value: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    # the keys, ascending, and the values of each
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    return keys, np.split(value[order].astype(np.float64), first[1:]) if len(keys) else []


@dataclass(frozen=True, slots=True)
class Lambda:
    """lambda* at each refresh: quantiles over layers and KV heads; its bound, and the share of all values there."""

    step: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    clip: float
    clipped: float
    places: list[Place]


def lambda_over_time(request: Request) -> Lambda:
    """Read lambda* at each refresh; raises `TraceError` if the run had no Selector, or all values are the clip."""
    wanted = rows_of(request.index, request.layer, request.head) & pc.field("lambda_star").is_valid()
    columns = ["step", "layer", "head", "lambda_star"]
    rows = request.trace.rows("selections", columns, wanted)
    if not len(rows):
        raise TraceError(
            f"trace {request.trace.path} has no lambda* of request {request.index}, recorded with policy "
            f"{request.trace.manifest['policy']}; record it with --policy sfi"
        )
    value = rows["lambda_star"].to_numpy().astype(np.float64)
    step, groups = _grouped(value, rows["step"].to_numpy())
    low, median, high = (
        np.array([np.quantile(group, share) for group in groups]) for share in (SPREAD[0], 0.5, SPREAD[1])
    )
    clip = request.trace.manifest["config"]["selector"]["lambda_clip"]
    clipped = (np.abs(value - clip) <= AT_CLIP * clip).mean()
    if clipped == 1:
        raise TraceError(
            f"trace {request.trace.path} has lambda* at selector.lambda_clip, {clip:g}, in every refresh of request "
            f"{request.index}, which is no course to draw"
        )
    pairs = zip(rows["layer"].to_pylist(), rows["head"].to_pylist(), strict=True)
    return Lambda(step, median, low, high, clip, float(clipped), sorted(set(pairs)))


@dataclass(frozen=True, slots=True)
class HeadMap:
    """A number for each layer (row) and KV head (column); NaN where a layer has no such head."""

    layers: list[int]
    heads: list[int]
    value: np.ndarray

    @classmethod
    def of(cls, values: Mapping[Place, float]) -> Self:
        """Take the number of each layer and KV head."""
        layers, heads = (sorted({place[axis] for place in values}) for axis in (0, 1))
        value = [[values.get((layer, head), np.nan) for head in heads] for layer in layers]
        return cls(layers, heads, np.array(value))


def retained_mass(request: Request) -> tuple[dict[Place, float], int]:
    """Average the retained mass of each layer and KV head over the audited fast steps; return their number too.

    Raises `TraceError` without an audit, a fast step or masses.
    """
    request.trace.require_audit()
    if not request.trace.masses:
        raise TraceError(f"trace {request.trace.path} has no masses: it was imported from a file without them")
    columns = ["step", "layer", "head", "retained_mass"]
    rows = request.trace.rows("supports", columns, request.wanted)
    rows = rows.filter(pc.is_in(rows["step"], pa.array(request.steps.step[~request.steps.slow])))
    if not len(rows):
        raise TraceError(f"trace {request.trace.path} has no audited fast step, and so no retained mass")
    means = rows.group_by(["layer", "head"]).aggregate([("retained_mass", "mean")])
    mass = {(row["layer"], row["head"]): row["retained_mass_mean"] for row in means.to_pylist()}
    return mass, len(pc.unique(rows["step"]))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of each decoding step by phase.

    Attributes:
        step: First step of each bar, which averages `per_bar` steps; step 0, the prefill, is left out.
        phases: Microseconds by the name of each phase that took any, without the audit's mean time, `audit_us`.
        prefill_us: Wall time of step 0; None where it was not recorded.
        stepless: Drafting passes of a lossless run whose token was rejected, so that they have no step.
    """

    step: np.ndarray
    per_bar: int
    phases: dict[str, np.ndarray]
    slow: np.ndarray
    prefill_us: float | None
    audit_us: float
    stepless: int


def step_phases(request: Request) -> Timeline:
    """Sum the innermost spans of each decoding step by phase.

    The rest of a step is its wall time less these and the audit's. Spans have the number of their run's first
    request, and the batch's steps. Raises `TraceError` if no decoding step has timings.
    """
    steps, later = request.steps, request.steps.step >= 1
    step = steps.step[later]
    spent_us = _spans(request, steps.batch_step[later])
    phases = {name: spent_us.get(name, np.zeros(len(step))) for name in PHASES if name != REST}
    audit_us = sum((spent_us.get(name, np.zeros(len(step))) for name in AUDIT), np.zeros(len(step)))
    taken = sum(phases.values()) + audit_us
    phases[REST] = np.maximum(0, steps.elapsed_us[later] - taken)
    width = thinning(len(step), MOST_BARS)
    edges = np.arange(0, len(step), width)
    counts = np.diff([*edges, len(step)])
    checks = request.trace.rows("verifications", ["drafted", "accepted"], rows_of(request.index))
    return Timeline(
        step=step[edges],
        per_bar=width,
        phases={name: np.add.reduceat(total, edges) / counts for name, total in phases.items() if total.any()},
        slow=step[steps.slow[later]],
        prefill_us=None if later.all() else float(steps.elapsed_us[0]),
        audit_us=float(audit_us.mean()),
        stepless=int(checks["drafted"].to_numpy().sum() - checks["accepted"].to_numpy().sum()),
    )


def _spans(request: Request, step: np.ndarray) -> dict[str, np.ndarray]:
    # microseconds of each span name, for each of the batch's steps
    table = request.trace.table("timings", ["request", "step", "name", "elapsed_us", "rank"])
    table = table.filter(pc.equal(pc.fill_null(table["rank"], 0), 0))  # ranks run in parallel: one's times
    table = table.filter((pc.field("request") <= request.index) & (pc.field("step") >= 1))
    table = table.filter(pc.is_in(table["step"], pa.array(step)))
    if not len(table):
        raise TraceError(f"trace {request.trace.path} has no timings of decoding steps")
    table = table.filter(pc.field("request") == pc.max(table["request"]))
    sums = table.group_by(["step", "name"]).aggregate([("elapsed_us", "sum")])
    phases: dict[str, np.ndarray] = {}
    for row in sums.to_pylist():
        spent_us = phases.setdefault(row["name"], np.zeros(len(step)))
        spent_us[np.searchsorted(step, row["step"])] = row["elapsed_us_sum"]
    return phases
