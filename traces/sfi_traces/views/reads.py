"""What each step of a request read: the sink, its selection, and the recent tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.schema import AHEAD
from sfi_traces.views.stability import Place, of_steps
from sfi_traces.views.view import View

KEYS = ("step", "layer", "head", "reason")  # of a selection


@dataclass(frozen=True, slots=True)
class Segments:
    """The parts of the cache that every fast step reads.

    Attributes:
        sink: Sink tokens; 0 for full attention.
        recent: First position of each step's recent segment; None for full attention.
    """

    sink: int
    recent: np.ndarray | None

    @classmethod
    def of(cls, view: View) -> "Segments":
        """Compute them as `RequestState.move_recent` does."""
        config, steps = view.trace.manifest["config"], view.steps
        if steps.slow.all():
            return cls(0, None)
        sink = min(config["sink"], int(steps.context[0] - steps.step[0]))
        start = np.maximum(sink, steps.context - config["recent"])
        if config["recent_mode"] == "anchored":
            last = np.maximum.accumulate(np.where(steps.slow, np.arange(len(start)), 0))
            start = start[last]
        return cls(sink, start)


@dataclass(frozen=True, slots=True)
class Refreshes:
    """The selections of a request, in the order of the steps that first read them.

    `positions` reads the positions of some; making this reads none.

    Attributes:
        step: The step that selected.
        ahead: Whether it selected for the next step alone (FreeKV's speculative selection).
        begin: The first step that reads the selection.
    """

    view: View
    step: np.ndarray
    layer: np.ndarray
    head: np.ndarray
    ahead: np.ndarray
    begin: np.ndarray

    @classmethod
    def of(cls, view: View) -> "Refreshes":
        """Find the selections of a view.

        A slow step's selection serves the steps after it; a fast step's, and an imported indexer's, also its
        own step.
        """
        steps = view.steps
        wanted = view.wanted & (pc.field("step") <= int(steps.step[-1]))
        rows = view.trace.rows("selections", list(KEYS), wanted)
        step, layer, head = (rows[name].to_numpy().astype(np.int64) for name in KEYS[:3])
        ahead = rows["reason"].to_numpy() == AHEAD
        slow = np.append(steps.slow, False)[steps.rows(step + ahead)]  # none after the last step
        begin = step + ahead + (slow & (not view.trace.reads_own_selection))
        order = np.argsort(begin, kind="stable")
        return cls(view, *(each[order] for each in (step, layer, head, ahead, begin)))

    @property
    def places(self) -> list[Place]:
        """Layers and KV heads that ever selected."""
        return sorted(set(zip(self.layer.tolist(), self.head.tolist(), strict=True)))

    def of_place(self, place: Place) -> np.ndarray:
        """Return the rows of a layer and KV head."""
        return np.flatnonzero((self.layer == place[0]) & (self.head == place[1]))

    def serving(self, step: int) -> np.ndarray:
        """Return the rows in force at a step: the last of each layer and KV head."""
        end = int(np.searchsorted(self.begin, step, side="right"))
        place = np.stack([self.layer[:end], self.head[:end]])
        _, back = np.unique(place[:, ::-1], axis=1, return_index=True)
        return np.sort(end - 1 - back)

    def positions(self, rows: np.ndarray) -> list[np.ndarray]:
        """Read the positions of some rows, ascending in each.

        Raises:
            TraceError: The trace has none, or a part is damaged.
        """
        table = self.view.trace.rows(
            "selections", [*KEYS, "positions"], self.view.wanted & of_steps(self.step[rows])
        )
        if table["positions"].null_count or len(table) == 0 < len(rows):
            raise TraceError(
                f"trace {self.view.trace.path} has no positions of its selections; record it with "
                "--set trace.positions=true"
            )
        keys = zip(*(table[name].to_pylist() for name in KEYS), strict=True)
        at = {(*key[:3], key[3] == AHEAD): row for row, key in enumerate(keys)}
        lists = table["positions"].combine_chunks()
        values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        places = [
            at[key] for key in zip(*(each[rows].tolist() for each in self._keys), strict=True)
        ]
        found = (values[ends[row] : ends[row + 1]] for row in places)
        return [positions[positions >= 0] for positions in found]

    @property
    def _keys(self) -> tuple[np.ndarray, ...]:
        return self.step, self.layer, self.head, self.ahead


@dataclass(frozen=True, slots=True)
class StepReads:
    """The positions that a step read, by layer and KV head.

    Attributes:
        places: Layers and KV heads of the view's full-attention layers.
        dense: Those that read everything.
        sink: Sink tokens that the others read.
        recent: First of the recent tokens that the others read.
        selected: Positions selected for the others.
        refreshed: Steps that selected them.
        notes: What the trace leaves open.
    """

    places: list[Place]
    dense: set[Place]
    sink: int
    recent: int
    selected: dict[Place, np.ndarray]
    refreshed: list[int]
    notes: list[str]

    @classmethod
    def of(cls, view: View, row: int) -> "StepReads":
        """Find what the step in row `row` of the view's steps read.

        Raises:
            TraceError: The step was fast, and its selections have no positions.
        """
        steps, config = view.steps, view.trace.manifest["config"]
        places = view.places
        slow = steps.slow[row] and not view.trace.reads_own_selection
        dense = {place for place in places if slow or place[0] in config["dense_layers"]}
        segments, context = Segments.of(view), int(steps.context[row])
        recent = context if segments.recent is None else int(segments.recent[row])
        if len(dense) == len(places):
            return cls(places, dense, segments.sink, recent, {}, [], _notes(view, row, places))
        refreshes = Refreshes.of(view)
        rows = refreshes.serving(int(steps.step[row]))
        sets = refreshes.positions(rows)
        keys = zip(refreshes.layer[rows].tolist(), refreshes.head[rows].tolist(), strict=True)
        selected = {
            place: positions
            for place, positions in zip(keys, sets, strict=True)
            if place in places and place not in dense
        }
        refreshed = sorted(set(refreshes.step[rows].tolist()))
        notes = _notes(view, row, [place for place in places if place in dense])
        if not selected:
            notes.append(
                f"policy {view.trace.manifest['policy']} had selected nothing; a fast step read the sink and "
                "the recent tokens"
            )
        return cls(places, dense, segments.sink, recent, selected, refreshed, notes)

    def of_place(self, place: Place, position: np.ndarray) -> np.ndarray:
        """Say for each position whether a layer and KV head read it."""
        if place in self.dense:
            return np.ones(len(position), bool)
        found: np.ndarray = (position < self.sink) | (position >= self.recent)
        return found | np.isin(position, self.selected.get(place, np.empty(0, np.int32)))


def _notes(view: View, row: int, dense: Sequence[Place]) -> list[str]:
    steps, found = view.steps, []
    said = view.trace.lossless or view.trace.reads_own_selection
    if steps.slow[row] and steps.attended[row] < steps.context[row] and not said:
        found.append(
            "in this slow step some KV heads read only what was selected; the trace does not say which"
        )
    if dense and not steps.slow[row]:
        layers = ", ".join(map(str, sorted({layer for layer, _ in dense})))
        found.append(f"layers left dense read everything: {layers}")
    sliding = [one for one in view.trace.manifest["model"]["layers"] if one["window"] is not None]
    if sliding and view.layer is None:
        found.append(f"{len(sliding)} layers with a sliding window are left aside")
    return found
