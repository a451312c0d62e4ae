"""The passages of the text that a decoding step read, and those that it should have read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.views.passage_edges import passage_edges
from sfi_traces.views.reads import StepReads
from sfi_traces.views.stability import Place
from sfi_traces.views.view import View

SINK, SELECTED, RECENT, ALL, MISSED = "sink", "selected", "recent", "all", "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A stretch of positions.

    Attributes:
        part: "sink", "selected", "recent"; "all" where the step read everything; "missed".
        last: Last position, included.
        tokens: Positions that some layer and KV head read; in a missed passage, did not read.
        places: Layers and KV heads that read any of them; in a missed passage, that missed any.
        mass: Share of dense attention on these positions, the mean over audited layers and KV heads; None if
            the step was not audited.
    """

    part: str
    first: int
    last: int
    text: str
    tokens: int
    places: list[Place]
    mass: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWords:
    """What a step read.

    Attributes:
        reason: Why it was slow; "" for a fast step.
        token: The generated token.
        attended: Tokens read per KV head, the mean over all layers, as recorded.
        audited: The layers and KV heads in `places` whose mass the trace has.
        places: Layers and KV heads of full-attention layers.
        refreshed: Steps whose selections the step read.
        passages: What it read; sorted by mass, then by number of places.
        missed: What dense attention attended to and the step did not read, most mass first. Empty without an
            audit of the step, or masses.
        masses: Whether the trace has masses; an import may lack them.
        notes: What the trace leaves open.
    """

    step: int
    slow: bool
    reason: str
    token: str
    context: int
    attended: float
    audited: list[Place]
    places: list[Place]
    refreshed: list[int]
    passages: list[Passage]
    missed: list[Passage]
    masses: bool = True
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; layers and KV heads as `{"layer": 0, "heads": [0, 1]}`."""
        found = asdict(self) | {
            "audited": _by_layer(self.audited),
            "places": _by_layer(self.places),
        }
        for name in ("passages", "missed"):
            own = getattr(self, name)
            for document, one in zip(found[name], own, strict=True):
                document |= {"places": _by_layer(one.places), "heads": len(one.places)}
        return found


def text_of(view: View) -> list[str]:
    """Return the text of each position, of the prompt and of the generated tokens.

    Raises:
        TraceError: The text was redacted, or recorded or imported without a tokenizer.
    """
    wanted = view.of_request
    rows = view.trace.rows("prompts", ["position", "token_text"], wanted).sort_by("position")
    texts = rows["token_text"].to_pylist()
    if not texts or texts[0] is None:
        why = "was redacted" if view.trace.redacted else "was recorded without a tokenizer"
        if view.trace.imported:
            why = "was imported from a file without texts; import it with --tokenizer"
        raise TraceError(f"trace {view.trace.path} has no text: it {why}")
    return [text or "" for text in texts] + view.steps.text


def step_words(view: View, step: int) -> StepWords:
    """Find what a step read.

    Raises:
        ConfigError: The request has no such step.
        TraceError: The trace has no text, or no positions of selections though the step was fast.
    """
    steps = view.steps
    row = int(steps.rows(np.array(step)))
    if row == len(steps.step) or steps.step[row] != step:
        raise ConfigError(
            f"step must be in {steps.step[0]} to {steps.step[-1]} of request {view.request}, got {step}"
        )
    read = StepReads.of(view, row)
    texts = text_of(view)
    passages = _Passages(texts, int(steps.context[row]), read)
    mass = _Mass.of(view, step, read)
    return StepWords(
        step=step,
        slow=bool(steps.slow[row]),
        reason=steps.reason[row],
        token=steps.text[row],
        context=int(steps.context[row]),
        attended=float(steps.attended[row]),
        audited=list(mass.found),
        places=read.places,
        refreshed=read.refreshed,
        passages=passages.read(mass),
        missed=passages.missed(mass),
        masses=view.trace.masses,
        notes=read.notes,
    )


@dataclass(frozen=True, slots=True)
class _Mass:
    # positions of each audited layer and KV head, their probabilities, and which were read
    found: dict[Place, tuple[np.ndarray, np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, view: View, step: int, reads: StepReads) -> "_Mass":
        if not view.trace.masses:
            return cls({})
        wanted = view.wanted & (pc.field("step") == step)
        rows = view.trace.rows("supports", ["layer", "head", "positions", "mass", "read"], wanted)
        found = {}
        for row in rows.sort_by([("layer", "ascending"), ("head", "ascending")]).to_pylist():
            place = row["layer"], row["head"]
            position = np.array(row["positions"], int)
            seen = row["read"]  # an import has none
            read = reads.of_place(place, position) if seen is None else np.array(seen, bool)
            found[place] = position, np.array(row["mass"], float), read
        return cls(found)

    def weight(self, context: int, *, read: bool) -> np.ndarray:
        # each position's mean mass over the places that read it, or over those that did not
        weight = np.zeros(context)
        for position, mass, seen in self.found.values():
            weight[position[seen == read]] += mass[seen == read] / len(self.found)
        return weight

    def marks(self, *, read: bool) -> dict[Place, np.ndarray]:
        return {place: position[seen == read] for place, (position, _, seen) in self.found.items()}


class _Passages:
    # cuts the text into passages

    def __init__(self, texts: list[str], context: int, reads: StepReads) -> None:
        self._texts, self._context, self._reads = texts, context, reads

    def read(self, mass: _Mass) -> list[Passage]:
        reads = self._reads
        weight = mass.weight(self._context, read=True)
        marks = {place: reads.selected.get(place, np.empty(0, int)) for place in reads.places}
        if len(reads.dense) == len(reads.places):
            if not mass.found:
                return [self._passage(ALL, 0, self._context - 1, self._context, reads.places, None)]
            found = self._cut(ALL, mass.marks(read=True), weight, 0, self._context)
        else:
            found = self._cut(
                SELECTED, marks, weight if mass.found else None, reads.sink, reads.recent
            )
            for part, first, end in ((SINK, 0, reads.sink), (RECENT, reads.recent, self._context)):
                if end > first:
                    held = float(weight[first:end].sum()) if mass.found else None
                    found.append(
                        self._passage(part, first, end - 1, end - first, reads.places, held)
                    )
        return _ranked(found)

    def missed(self, mass: _Mass) -> list[Passage]:
        weight = mass.weight(self._context, read=False)
        return _ranked(self._cut(MISSED, mass.marks(read=False), weight, 0, self._context))

    def _cut(
        self,
        part: str,
        marks: dict[Place, np.ndarray],
        weight: np.ndarray | None,
        first: int,
        end: int,
    ) -> list[Passage]:
        # passages of the marked positions from `first` to before `end`
        marked = np.zeros(self._context, bool)
        for position in marks.values():
            marked[position] = True
        marked[:first] = marked[end:] = False
        at = np.flatnonzero(marked)
        edges = passage_edges(at.tolist(), self._texts)
        which = np.full(self._context, -1)
        for number, (low, high) in enumerate(edges):
            which[low : high + 1] = number
        places: list[list[Place]] = [[] for _ in edges]
        for place, position in marks.items():
            for number in np.unique(which[position][marked[position]]).tolist():
                places[number].append(place)
        return [
            self._passage(
                part, low, high, int(marked[low : high + 1].sum()), places[number],
                None if weight is None else float(weight[low : high + 1].sum()),
            )
            for number, (low, high) in enumerate(edges)
        ]  # fmt: skip

    def _passage(
        self, part: str, first: int, last: int, tokens: int, places: list[Place], mass: float | None
    ) -> Passage:
        text = "".join(self._texts[first : last + 1])
        return Passage(
            part=part, first=first, last=last, text=text, tokens=tokens, places=places, mass=mass
        )


def _by_layer(places: Sequence[Place]) -> list[dict[str, Any]]:
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(places):
        heads.setdefault(layer, []).append(head)
    return [{"layer": layer, "heads": own} for layer, own in heads.items()]


def _ranked(found: list[Passage]) -> list[Passage]:
    return sorted(found, key=lambda one: (-(one.mass or 0.0), -len(one.places), one.first))
