"""The passages of the text that a decoding step read, and those that it should have read.

Paper gap: what a passage is. Positions with at most `GAP` others between them are one; it ends with a
sentence once it has `LONG` tokens, and with `LONGEST` at the latest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.selections import StepMass, StepReads
from sfi_traces.model.trace import Place, Row

GAP, LONG, LONGEST = 2, 24, 64  # see above
ENDS = (".", "!", "?", "\n")
SINK, SELECTED, RECENT, ALL, MISSED = "sink", "selected", "recent", "all", "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A stretch of positions, `last` included; where it is missed, read stands for missed.

    Attributes:
        part: "sink", "selected", "recent"; "all" where the step read everything; "missed".
        tokens: Positions that some layer and KV head read; `places` are those that read any.
        share: Share of the (position, layer, KV head) triples that are read, of the places that read any so.
        mass: Share of dense attention, the mean over audited layers and KV heads; None without an audit.
    """

    part: str
    first: int
    last: int
    text: str
    tokens: int
    places: Sequence[Place]
    share: float
    mass: float | None

    def to_dict(self) -> Row:
        """Return plain values; layers and KV heads as `{"layer": 0, "heads": [0, 1]}`."""
        row = asdict(self) | {"places": _by_layer(self.places), "heads": len(self.places)}
        del row["share"]
        return row


def text_of(request: Request) -> list[str]:
    """Return the text of each position, of prompt and generated tokens; raises `TraceError` without text."""
    if not request.prompt or request.prompt[0] is None:
        why = "was redacted" if request.trace.redacted else "was recorded without a tokenizer"
        if request.trace.imported:
            why = "was imported from a file without texts; import it with --tokenizer"
        raise TraceError(f"trace {request.trace.path} has no text: it {why}")
    return request.words


def step_words(request: Request, step: int) -> Row:
    """Find what a step read, as the document of `sfi trace show --step`.

    `passages` is what it read, sorted by mass, then by number of places; `missed` what dense attention attended to and
    the step did not read, empty without masses. `attended` is the mean over all layers, as recorded; `audited` the
    places whose mass the trace has; `refreshed` the steps whose selections were read; `dense` the row of the table
    `logits`, None if the step was not compared; `notes` what the trace leaves open.

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
    mass = StepMass.of(request.support_rows.at(step), read) if request.trace.masses else StepMass({})
    missed = _cut(MISSED, texts, mass.marks(read=False), mass.weight(read.context, read=False), read.context)
    return {
        "step": step,
        "slow": bool(steps.slow[row]),
        "reason": steps.reason[row],
        "token": steps.text[row],
        "context": int(steps.context[row]),
        "attended": float(steps.attended[row]),
        "audited": _by_layer(list(mass.by_place)),
        "places": _by_layer(read.places),
        "refreshed": read.refreshed,
        "passages": _ranked(read_passages(texts, read, mass)),
        "missed": _ranked(missed),
        "dense": request.compared.get(step),
        "masses": request.trace.masses,
        "notes": list(_notes(request, row, read)),
    }


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


def read_passages(texts: Sequence[str], reads: StepReads, mass: StepMass) -> list[Passage]:
    """Return the selected passages, then the sink and the recent tokens; of a step that read everything all of it.

    `texts` has the text of each position, `mass` where the step's attention lay.
    """
    context = reads.context
    weight = mass.weight(context, read=True) if mass.by_place else None
    if len(reads.dense) < len(reads.places):
        passages = _cut(SELECTED, texts, reads.selected or {}, weight, context, reads.sink, reads.recent)
        ends = [(SINK, 0, reads.sink), (RECENT, reads.recent, context)]
    elif mass.by_place:
        return _cut(ALL, texts, mass.marks(read=True), weight, context)
    else:
        passages, ends = [], [(ALL, 0, context)]
    for part, first, end in ends:
        if end > first:
            passages.append(_passage(part, texts, first, end - 1, weight, end - first, reads.places, 1.0))
    return passages


def _cut(
    part: str, texts: Sequence[str], marks: dict[Place, np.ndarray], weight: np.ndarray | None, context: int,
    first: int = 0, end: int | None = None,
) -> list[Passage]:  # fmt: skip
    # passages of the marked positions from `first` to before `end`
    marked = np.zeros(context, bool)
    for position in marks.values():
        marked[position] = True
    marked[:first] = marked[context if end is None else end :] = False
    edges = _edges(np.flatnonzero(marked).tolist(), texts)
    which = np.full(context, -1)
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
        _passage(
            part, texts, low, high, weight, int(marked[low : high + 1].sum()), places[number],
            int(triples[number]) / (len(marks) * (high + 1 - low)),
        )
        for number, (low, high) in enumerate(edges)
    ]  # fmt: skip


def _passage(
    part: str, texts: Sequence[str], first: int, last: int, weight: np.ndarray | None, tokens: int,
    places: Sequence[Place], share: float,
) -> Passage:  # fmt: skip
    mass = None if weight is None else float(weight[first : last + 1].sum())
    text = "".join(texts[first : last + 1])
    return Passage(part=part, first=first, last=last, text=text, tokens=tokens, places=places, share=share, mass=mass)


def _by_layer(places: Sequence[Place]) -> list[Row]:
    layers = groupby(sorted(places), itemgetter(0))
    return [{"layer": layer, "heads": [head for _, head in of_layer]} for layer, of_layer in layers]


def _ranked(passages: list[Passage]) -> list[Row]:
    ranked = sorted(passages, key=lambda passage: (-(passage.mass or 0.0), -len(passage.places), passage.first))
    return [passage.to_dict() for passage in ranked]


def _edges(at: list[int], texts: Sequence[str]) -> list[tuple[int, int]]:
    # the first and last position of each passage of some marked positions, ascending
    passages: list[tuple[int, int]] = []
    first = last = -1
    for position in at:
        tokens = last - first + 1
        ended = tokens >= LONG and "".join(texts[last : last + 1]).rstrip(" ").endswith(ENDS)
        if last < 0:
            first = position
        elif position - last > GAP + 1 or tokens >= LONGEST or ended:
            passages.append((first, last))
            first = position
        last = position
    return passages if last < 0 else [*passages, (first, last)]
