"""The steps of a recorded run as plain data for a player; a step's rows are read when it is shown."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.selections import StepMass
from sfi_traces.model.supports import even_shares
from sfi_traces.model.trace import Trace
from sfi_traces.views.words import ALL, RECENT, SELECTED, SINK, Passage, read_passages

MEASURES = ("retained_mass", "overlap_previous_step", "overlap_last_refresh")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """The context in bins, oldest first: the mass of each, and which have sink, recent or selected tokens.

    `added` are bins above an even share that were not at the audited step before, `removed` the reverse.
    """

    mass: np.ndarray
    added: np.ndarray
    removed: np.ndarray
    sink: np.ndarray
    recent: np.ndarray
    selected: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One step.

    Attributes:
        row: The step's row of the table `steps`.
        measures: Retained mass and overlaps by column name, means over the request's `places`; None where not recorded.
        lambda_star: Mean lambda* of a refresh; None without a Selector.
        dense: The row of `logits`, if dense attention has another most probable token.
    """

    row: dict[str, Any]
    measures: dict[str, float | None]
    lambda_star: float | None
    dense: dict[str, Any] | None


def playable(
    trace: Trace,
    request: int | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
) -> Request:
    """Open one request of a trace, by default the first, with the layers and KV heads that fast steps change.

    Raises `TraceError` for a trace without a step or of a lossless run; `ConfigError` for a request, layer or head that
    it lacks.
    """
    if trace.lossless:
        trace.require_audit()
    chosen = Request(trace, request)
    places = chosen.support_rows.places() or chosen.selection_rows.places() or chosen.places
    places = [place for place in places if place[0] not in trace.manifest["config"]["dense_layers"]]
    if not places:
        raise TraceError(f"trace {trace.path} has no layer that fast steps change")
    chosen.choose(layers, heads, places)
    return chosen


def frame(request: Request, step: int) -> Frame:
    """Return what is shown of a step."""
    return Frame(
        row=request.rows.slice(step, 1).to_pylist()[0],
        measures=_means(request.support_rows.at(step), MEASURES),
        lambda_star=_means(request.selection_rows.at(step), ["lambda_star"])["lambda_star"],
        dense=request.compared[step] if step in request.disagreeing else None,
    )


def sentence_begin(request: Request, step: int) -> int:
    """Return the first step of a step's sentence."""
    sentence = request.steps.sentence
    return int(np.argmax(sentence == sentence[step]))


def is_audited(request: Request, step: int) -> bool:
    """Say whether a step has a support."""
    return request.support_rows.last(step) == step


def strip(request: Request, step: int, width: int) -> Strip:
    """Return a step's context in `width` bins; the audited step before is put into the same bins."""
    memory = request.memory
    length = int(memory.length_N[step])
    mass = _mass(request, step, width, length)
    earlier = request.support_rows.last(step - 1)
    old = mass if earlier is None else _mass(request, earlier, width, length)
    lit, was_lit = mass > 1 / width, old > 1 / width
    bins, every_bin = np.arange(length) * width // length, np.arange(width)
    audited = is_audited(request, step)
    selected = np.concatenate([np.empty(0, int), *request.in_force(step).values()])
    return Strip(
        mass=mass,
        added=lit & ~was_lit & audited,
        removed=was_lit & ~lit & audited,
        sink=np.isin(every_bin, bins[: memory.sink]),
        recent=np.isin(every_bin, bins[memory.start_N[step] :]),
        selected=np.isin(every_bin, bins[selected]),
    )


def passages(request: Request, step: int, most: int = 40) -> list[Passage]:
    """Return what a step reads: the sink, up to `most` other passages, the recent tokens.

    The others are sorted by mass, or without an audit by share, greatest first.
    """

    def weight(passage: Passage) -> tuple[float, int]:
        tokens = passage.last + 1 - passage.first
        return -(passage.share * tokens if passage.mass is None else passage.mass), passage.first

    reads = request.reads(step)
    mass = StepMass.of(even_shares(request.support_rows.at(step)), reads)
    ranked = sorted(read_passages(request.words, reads, mass), key=weight)
    sink, recent = ([passage for passage in ranked if passage.part == part] for part in (SINK, RECENT))
    return [*sink, *[passage for passage in ranked if passage.part in (SELECTED, ALL)][:most], *recent]


def _mass(request: Request, step: int, width: int, length: int) -> np.ndarray:
    rows = even_shares(request.support_rows.at(step))  # an import may have no masses
    position, mass = (pc.list_flatten(rows[name]).to_numpy() for name in ("positions", "mass"))
    bins = position.astype(np.int64) * width // length
    share = mass.astype(np.float64) / len(request.places)
    return np.bincount(bins, share, minlength=width)


def _means(rows: pa.Table, names: Sequence[str]) -> dict[str, float | None]:
    return {name: pc.mean(rows[name]).as_py() if len(rows) else None for name in names}
