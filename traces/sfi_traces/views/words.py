"""The passages of the text that a decoding step read, and those that it should have read.

Paper gap: what a passage is. Positions with at most `GAP` others between them are one; it ends with a
sentence once it has `LONG` tokens, and with `LONGEST` at the latest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.selections import StepMass, StepReads
from sfi_traces.model.trace import Place

GAP, LONG, LONGEST = 2, 24, 64  # see above
ENDS = (".", "!", "?", "\n")
SINK, SELECTED, RECENT, ALL, MISSED = "sink", "selected", "recent", "all", "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A stretch of positions.

    Attributes:
        part: "sink", "selected", "recent"; "all" where the step read everything; "missed".
        last: Last position, included.
        tokens: Positions that some layer and KV head read; in a missed passage, did not read.
        places: Layers and KV heads that read any of them; in a missed passage, that missed any.
        share: Share of the (position, layer, KV head) triples that are read, of the places that read any so.
        mass: Share of dense attention on these positions, the mean over audited layers and KV heads; None if
            the step was not audited.
    """

    part: str
    first: int
    last: int
    text: str
    tokens: int
    places: Sequence[Place]
    share: float
    mass: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWords:
    """What a step read.

    Attributes:
        reason: Why it was slow; "" for a fast step.
        attended: Tokens read per KV head, the mean over all layers, as recorded.
        audited: The layers and KV heads in `places` whose mass the trace has.
        places: Layers and KV heads of full-attention layers.
        refreshed: Steps whose selections the step read.
        passages: What it read; sorted by mass, then by number of places.
        missed: What dense attention attended to and the step did not read, most mass first. Empty without an
            audit of the step, or masses, which an import may lack.
        dense: The step's row of the table `logits`; None if the step was not compared.
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
    dense: dict[str, Any] | None = None
    masses: bool = True
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; layers and KV heads as `{"layer": 0, "heads": [0, 1]}`."""
        document = asdict(self) | {"audited": _by_layer(self.audited), "places": _by_layer(self.places)}
        for name in ("passages", "missed"):
            for row, passage in zip(document[name], getattr(self, name), strict=True):
                row |= {"places": _by_layer(passage.places), "heads": len(passage.places)}
                del row["share"]
        return document


def text_of(request: Request) -> list[str]:
    """Return the text of each position, of prompt and generated tokens; raises `TraceError` without text."""
    if not request.prompt or request.prompt[0] is None:
        why = "was redacted" if request.trace.redacted else "was recorded without a tokenizer"
        if request.trace.imported:
            why = "was imported from a file without texts; import it with --tokenizer"
        raise TraceError(f"trace {request.trace.path} has no text: it {why}")
    return request.words


def step_words(request: Request, step: int) -> StepWords:
    """Find what a step read.

    Raises `ConfigError` for a step that the request lacks; `TraceError` without text, or without the positions of
    selections of a fast step.
    """
    steps = request.steps
    row = int(steps.rows(np.array(step)))
    if row == len(steps.step) or steps.step[row] != step:
        raise ConfigError(f"step must be in {steps.step[0]} to {steps.step[-1]} of request {request.index}, got {step}")
    read = request.reads(row)
    if read.selected is None:
        raise TraceError(
            f"trace {request.trace.path} has no positions of its selections; record it with --set trace.positions=true"
        )
    texts = text_of(request)
    mass = StepMass({})
    if request.trace.masses:
        mass = StepMass.of(request.support_rows.at(step), read)
    passages = Passages(texts, read, mass)
    return StepWords(
        step=step,
        slow=bool(steps.slow[row]),
        reason=steps.reason[row],
        token=steps.text[row],
        context=int(steps.context[row]),
        attended=float(steps.attended[row]),
        audited=list(mass.by_place),
        places=list(read.places),
        refreshed=read.refreshed,
        passages=_ranked(passages.read()),
        missed=_ranked(passages.missed()),
        dense=request.compared.get(step),
        masses=request.trace.masses,
        notes=list(_notes(request, row, read)),
    )


def _notes(request: Request, row: int, read: StepReads) -> Iterator[str]:
    steps = request.steps
    said = request.trace.lossless or request.trace.reads_own_selection
    if steps.slow[row] and steps.attended[row] < steps.context[row] and not said:
        yield "in this slow step some KV heads read only what was selected; the trace does not say which"
    if read.dense and not steps.slow[row]:
        layers = ", ".join(map(str, sorted({layer for layer, _ in read.dense})))
        yield f"layers left dense read everything: {layers}"
    sliding = [layer for layer in request.trace.manifest["model"]["layers"] if layer["window"] is not None]
    if sliding and request.layer is None:
        yield f"{len(sliding)} layers of windows or states are left aside"
    if not read.selected and len(read.dense) < len(read.places):
        yield (
            f"policy {request.trace.manifest['policy']} had selected nothing; a fast step read the sink and "
            "the recent tokens"
        )


class Passages:
    """Cuts what a step read, and what it missed, into passages."""

    def __init__(self, texts: Sequence[str], reads: StepReads, mass: StepMass) -> None:
        """Take the text of each position of the context, and where the step's attention lay."""
        self._texts, self._reads, self._mass = texts, reads, mass
        self._context = reads.context

    def read(self) -> list[Passage]:
        """Return the selected passages, then the sink and the recent tokens; of a dense step all of it."""
        reads, mass = self._reads, self._mass
        weight = mass.weight(self._context, read=True) if mass.by_place else None
        if len(reads.dense) == len(reads.places):
            if not mass.by_place:
                return [self._whole(ALL, 0, self._context, None)]
            return self._cut(ALL, mass.marks(read=True), weight, 0, self._context)
        passages = self._cut(SELECTED, reads.selected or {}, weight, reads.sink, reads.recent)
        ends = ((SINK, 0, reads.sink), (RECENT, reads.recent, self._context))
        return passages + [self._whole(*end, weight) for end in ends if end[2] > end[1]]

    def missed(self) -> list[Passage]:
        """Return what dense attention attended to and the step did not read."""
        weight = self._mass.weight(self._context, read=False)
        return self._cut(MISSED, self._mass.marks(read=False), weight, 0, self._context)

    def _cut(
        self, part: str, marks: dict[Place, np.ndarray], weight: np.ndarray | None, first: int, end: int
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
        triples = np.zeros(len(edges), int)
        for place, position in marks.items():
            numbers = which[position][marked[position]]
            triples += np.bincount(numbers, minlength=len(edges))
            for number in np.unique(numbers).tolist():
                places[number].append(place)
        return [
            Passage(
                part=part, first=low, last=high, text="".join(self._texts[low : high + 1]),
                tokens=int(marked[low : high + 1].sum()), places=places[number],
                share=int(triples[number]) / (len(marks) * (high + 1 - low)),
                mass=None if weight is None else float(weight[low : high + 1].sum()),
            )
            for number, (low, high) in enumerate(edges)
        ]  # fmt: skip

    def _whole(self, part: str, first: int, end: int, weight: np.ndarray | None) -> Passage:
        # a passage that all layers and KV heads read
        return Passage(
            part=part, first=first, last=end - 1, text="".join(self._texts[first:end]), tokens=end - first,
            places=self._reads.places, share=1.0,
            mass=None if weight is None else float(weight[first:end].sum()),
        )  # fmt: skip


def _by_layer(places: Sequence[Place]) -> list[dict[str, Any]]:
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(places):
        heads.setdefault(layer, []).append(head)
    return [{"layer": layer, "heads": of_layer} for layer, of_layer in heads.items()]


def _ranked(passages: list[Passage]) -> list[Passage]:
    return sorted(passages, key=lambda passage: (-(passage.mass or 0.0), -len(passage.places), passage.first))


def passage_edges(at: Iterable[int], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first and last position of each passage.

    `at` are the marked positions, ascending; `texts` has the text of each position of the context.
    """
    passages: list[tuple[int, int]] = []
    first = last = -1
    for position in at:
        if last < 0:
            first = position
        elif position - last > GAP + 1 or _is_long(last - first + 1, "".join(texts[last : last + 1])):
            passages.append((first, last))
            first = position
        last = position
    return passages if last < 0 else [*passages, (first, last)]


def _is_long(tokens: int, text: str) -> bool:
    return tokens >= LONGEST or (tokens >= LONG and text.rstrip(" ").endswith(ENDS))
