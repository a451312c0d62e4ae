"""A recorded run step by step, as plain data for a player; rows are read when their step is shown."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request, check_known, step_table
from sfi_traces.model.rows import Rows
from sfi_traces.model.step_reads import StepMass, StepReads
from sfi_traces.model.steps import Bools, Positions
from sfi_traces.model.supports import even_shares
from sfi_traces.model.trace import Place, Trace, of_request
from sfi_traces.overlap import Ints
from sfi_traces.views.words import ALL, AUDITED, RECENT, SELECTED, SINK, Passage, Passages

PROMPT_TAIL = 400  # tokens of the prompt before the generated text
REDACTED = "(the trace has no text)"
MEASURES = ("retained_mass", "overlap_previous_step", "overlap_last_refresh")

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """The context in bins, oldest first: the mass of each, and which have sink, recent or selected tokens.

    `added` are bins above an even share that were not at the audited step before, `removed` the reverse.
    """

    mass: Numbers
    added: Bools
    removed: Bools
    sink: Bools
    recent: Bools
    selected: Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One step.

    Attributes:
        before: Text before the current sentence, from the end of the prompt on.
        sentence: The current sentence before this step's token.
        row: The step's row of the table `steps`.
        audited: Whether the step has a strip.
        measures: Retained mass and overlaps by column name; None where not recorded.
        lambda_star: Mean lambda* of a refresh; None without a Selector.
        dense: The row of `logits`, if dense attention has another most probable token.
    """

    before: str
    sentence: str
    token: str
    row: dict[str, Any]
    audited: bool
    measures: dict[str, float | None]
    lambda_star: float | None
    dense: dict[str, Any] | None


class Playback:
    """One request of a trace; values are means over the `chosen` ones of the layers and KV heads in `places`.

    `texts` has the generated tokens, None in a redacted trace; `slow_at` the slow steps.
    """

    def __init__(self, recorded: Request, *, audited: bool) -> None:
        """Take a request; raises `TraceError` if `audited`, and no layer that fast steps change was."""
        self.recorded, self.memory = recorded, recorded.memory
        trace, request = recorded.trace, recorded.index
        self.texts: list[str | None] = recorded.rows["token_text"].to_pylist()
        self.slow_at: list[int] = np.flatnonzero(recorded.steps.slow).tolist()
        self._supports = Rows(trace, "supports", request, (*AUDITED, *MEASURES))
        self._selections = Rows(trace, "selections", request, ("lambda_star",))
        self.places = self._places(audited=audited)
        self.chosen = self.places

    @classmethod
    def load(
        cls,
        trace: Trace,
        request: int | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
        *,
        audited: bool = True,
    ) -> Self:
        """Open one request, by default the first, of a trace; optionally only some layers and KV heads.

        `audited` refuses a trace without an audit, which has no strips.

        Raises `TraceError` for a trace without a step or an audit, or of a lossless run; `ConfigError` for a request,
        layer or head that it lacks.
        """
        if audited or trace.lossless:
            trace.require_audit()
        steps = step_table(trace)
        known = sorted(pc.unique(steps["request"]).to_pylist())
        if request is not None:
            check_known("request", [request], known)
        own = known[0] if request is None else request
        playback = cls(Request(trace, own, of_request(steps, own)), audited=audited)
        playback.choose(layers, heads)
        playback.places = playback.chosen
        return playback

    def choose(self, layers: Collection[int] | None = None, heads: Collection[int] | None = None) -> None:
        """Show these layers and KV heads, None for all; raises `ConfigError` for one that the trace lacks."""
        chosen = self.places
        for at, (name, wanted) in enumerate((("layer", layers), ("head", heads))):
            if wanted is not None:
                check_known(name, sorted(wanted), {place[at] for place in chosen})
                chosen = [place for place in chosen if place[at] in wanted]
        self.chosen = chosen
        for rows in (self._supports, self._selections):
            rows.layers, rows.heads = ({place[at] for place in chosen} for at in (0, 1))

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self.texts)

    @cached_property
    def prompt(self) -> list[str]:
        """The prompt's tokens by position; empty where the trace has no text."""
        texts = [text or "" for text in self.recorded.prompt]
        return [""] * (int(self.memory.length_N[0]) - len(texts)) + texts

    @cached_property
    def words(self) -> list[str]:
        """The prompt's and the generated tokens by position; empty where the trace has no text."""
        return self.prompt + self.recorded.steps.text

    def frame(self, step: int) -> Frame:
        """Return what is shown of a step."""
        row = self.recorded.rows.slice(step, 1).to_pylist()[0]
        first, texts = self.sentence_begin(step), self.recorded.steps.text
        tail = "".join(self.prompt[-PROMPT_TAIL:])
        return Frame(
            before=REDACTED if row["token_text"] is None else tail + "".join(texts[:first]),
            sentence="".join(texts[first:step]),
            token=texts[step],
            row=row,
            audited=self.audited(step),
            measures=_means(self._supports.at(step), MEASURES),
            lambda_star=_means(self._selections.at(step), ["lambda_star"])["lambda_star"],
            dense=self.recorded.compared[step] if step in self.recorded.disagreeing else None,
        )

    def sentence_begin(self, step: int) -> int:
        """Return the first step of a step's sentence."""
        sentence = self.recorded.steps.sentence
        return int(np.argmax(sentence == sentence[step]))

    def strip(self, step: int, width: int) -> Strip:
        """Return a step's context in `width` bins; the audited step before is put into the same bins."""
        length = int(self.memory.length_N[step])
        mass = self._mass(step, width, length)
        earlier = self._supports.last(step - 1)
        old = mass if earlier is None else self._mass(earlier, width, length)
        lit, was_lit = mass > 1 / width, old > 1 / width
        bins = np.arange(length) * width // length
        audited = self.audited(step)
        selected = np.concatenate([np.empty(0, int), *self.in_force(step).values()])
        return Strip(
            mass=mass,
            added=lit & ~was_lit & audited,
            removed=was_lit & ~lit & audited,
            sink=_marked(bins[: self.memory.sink], width),
            recent=_marked(bins[self.memory.start_N[step] :], width),
            selected=_marked(bins[selected], width),
        )

    def audited(self, step: int) -> bool:
        """Say whether a step has a support."""
        return self._supports.last(step) == step

    def in_force(self, step: int) -> dict[Place, Positions]:
        """Return the positions in force at a step in the chosen layers and KV heads, as far as recorded."""
        selections = self.recorded.selections
        return selections.by_place(selections.serving(step, set(self.chosen))) or {}

    def passages(self, step: int, most: int = 40) -> list[Passage]:
        """Return what a step reads: the sink, up to `most` other passages, the recent tokens.

        The others are sorted by mass, or without an audit by share, greatest first.
        """
        reads = StepReads.of(self.recorded, step, self.chosen)
        mass = StepMass.of(even_shares(self._supports.at(step)), reads)
        found = sorted(Passages(self.words, reads, mass).read(), key=_by_weight)
        sink, recent = ([one for one in found if one.part == part] for part in (SINK, RECENT))
        return [*sink, *[one for one in found if one.part in (SELECTED, ALL)][:most], *recent]

    def _places(self, *, audited: bool) -> list[Place]:
        trace = self.recorded.trace
        recorded = self._supports.places()
        if not recorded and not audited:
            recorded = self._selections.places() or self.recorded.places()
        dense = trace.manifest["config"]["dense_layers"]
        places = [place for place in recorded if place[0] not in dense]
        if not places:
            raise TraceError(f"trace {trace.path} has no audited step of a layer that fast steps change")
        return places

    def _mass(self, step: int, width: int, length: int) -> Numbers:
        rows = even_shares(self._supports.at(step))  # an import may have no masses
        position, mass = (pc.list_flatten(rows[name]).to_numpy() for name in ("positions", "mass"))
        bins = position.astype(np.int64) * width // length
        share = mass.astype(np.float64) / len(self.chosen)
        return np.asarray(np.bincount(bins, share, minlength=width), np.float64)


def _by_weight(passage: Passage) -> tuple[float, int]:
    tokens = passage.last + 1 - passage.first
    return -(passage.share * tokens if passage.mass is None else passage.mass), passage.first


def _means(rows: pa.Table, names: Sequence[str]) -> dict[str, float | None]:
    return {name: pc.mean(rows[name]).as_py() if len(rows) else None for name in names}


def _marked(bins: Ints, width: int) -> Bools:
    marks = np.zeros(width, np.bool_)
    marks[bins] = True
    return marks
