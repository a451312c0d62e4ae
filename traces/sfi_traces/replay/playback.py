"""A recorded run step by step, as plain data for a player."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_traces.read.reader import Trace
from sfi_traces.replay.memory import Memory
from sfi_traces.replay.setting import Setting
from sfi_traces.replay.support import Supports, of_request

PROMPT_TAIL = 400  # tokens of the prompt before the generated text
REDACTED = "(the trace has no text)"
MEASURES = ("retained_mass", "overlap_previous_step", "overlap_last_refresh")

Numbers = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """The context as a row of bins, oldest first.

    Attributes:
        mass: Share of the recorded attention in each bin, of a step's whole attention.
        added: Bins that hold more than an even share now, and did not at the audited step before.
        removed: The other way round.
        sink: Bins with sink tokens.
        recent: Bins with recent tokens.
        selected: Bins with tokens that the last refresh selected, where the trace has their positions.
    """

    mass: Numbers
    added: Marks
    removed: Marks
    sink: Marks
    recent: Marks
    selected: Marks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One step.

    Attributes:
        step: Decoding step t.
        before: Text before the current sentence, from the end of the prompt on.
        sentence: The current sentence before this step's token.
        token: The token that the step generated.
        slow: Whether the step was slow.
        reason: Why; empty for a fast one.
        steps_since_slow: Fast steps since the last slow step.
        sentence_index: Number of the sentence.
        attended_tokens: Tokens read per KV head.
        context_tokens: Cached tokens.
        audited: Whether the strip is known; without, it is empty.
        measures: Retained mass and overlaps, by the names of their columns; None where not recorded.
        lambda_star: Mean of lambda* at a refresh; None without a Selector.
    """

    step: int
    before: str
    sentence: str
    token: str
    slow: bool
    reason: str
    steps_since_slow: int
    sentence_index: int
    attended_tokens: float
    context_tokens: int
    audited: bool
    measures: dict[str, float | None]
    lambda_star: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Playback:
    """One request of a trace; everything is the mean over the chosen layers and KV heads.

    Attributes:
        supports: Recorded supports of the request; steps without an audit have none.
        memory: Sizes of its memory.
        rows: Steps of the request, in order.
        prompt: The end of its prompt.
        measured: Means of the measures, by step.
        refreshes: Selected positions and mean lambda* of each refresh, by step.
    """

    supports: Supports
    memory: Memory
    rows: list[dict[str, Any]]
    prompt: str
    measured: dict[int, dict[str, float | None]]
    refreshes: dict[int, tuple[npt.NDArray[np.int32], float | None]]

    @classmethod
    def load(
        cls,
        trace: Trace,
        request: int | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
    ) -> Self:
        """Read one request, the first where none is named.

        Raises:
            TraceError: The trace has no audit.
            ConfigError: No such request, layer or head.
        """
        supports = Supports.load(trace, request, layers, heads, gaps=True, even=True)[0]
        own = of_request(trace.table("steps"), supports.request).sort_by("step")
        rows = own.to_pylist()
        slow = np.array([row["slow"] for row in rows])
        return cls(
            supports=supports,
            memory=Memory.of(Setting.recorded(trace).config, slow, supports.length_N),
            rows=rows,
            prompt=_prompt(trace, supports.request),
            measured=_measured(trace, supports),
            refreshes=_refreshes(trace, supports),
        )

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self.rows)

    @property
    def slow_at(self) -> list[int]:
        """The slow steps."""
        return [step for step, row in enumerate(self.rows) if row["slow"]]

    def frame(self, step: int) -> Frame:
        """Return a step."""
        row = self.rows[step]
        first = next(t for t, other in enumerate(self.rows) if other["sentence"] == row["sentence"])
        texts = [other["token_text"] or "" for other in self.rows[: step + 1]]
        redacted = row["token_text"] is None
        return Frame(
            step=step,
            before=REDACTED if redacted else self.prompt + "".join(texts[:first]),
            sentence="".join(texts[first:step]),
            token=texts[step],
            slow=row["slow"],
            reason=row["reason"],
            steps_since_slow=row["steps_since_slow"],
            sentence_index=row["sentence"],
            attended_tokens=row["attended_tokens"],
            context_tokens=row["context_tokens"],
            audited=self._audited(step),
            measures=self.measured.get(step, dict.fromkeys(MEASURES)),
            lambda_star=self.refreshes.get(step, (None, None))[1],
        )

    def strip(self, step: int, width: int) -> Strip:
        """Return a step's context in `width` bins; of the audited step before, its bins are this step's."""
        length = int(self.supports.length_N[step])
        mass = self._mass(step, width, length)
        earlier = next((t for t in range(step - 1, -1, -1) if self._audited(t)), None)
        old = mass if earlier is None else self._mass(earlier, width, length)
        lit, was_lit = mass > 1 / width, old > 1 / width
        bins = np.arange(length) * width // length
        refresh = max((t for t in self.refreshes if t <= step), default=None)
        selected = np.zeros(0, np.int32) if refresh is None else self.refreshes[refresh][0]
        return Strip(
            mass=mass,
            added=lit & ~was_lit & self._audited(step),
            removed=was_lit & ~lit & self._audited(step),
            sink=_marked(bins[: self.memory.sink], width),
            recent=_marked(bins[self.memory.start_N[step] :], width),
            selected=_marked(bins[selected], width),
        )

    def _audited(self, step: int) -> bool:
        return bool((self.supports.position_NUK[step] >= 0).any())

    def _mass(self, step: int, width: int, length: int) -> Numbers:
        position_UK = self.supports.position_NUK[step]
        known = position_UK >= 0
        bins = position_UK[known].astype(np.int64) * width // length
        mass = np.bincount(bins, self.supports.mass_NUK[step][known], minlength=width)
        return mass / len(position_UK)


def _marked(bins: npt.NDArray[Any], width: int) -> Marks:
    marks = np.zeros(width, np.bool_)
    marks[bins] = True
    return marks


def _prompt(trace: Trace, request: int) -> str:
    table = trace.table("prompts", ["request", "position", "token_text"])
    own = table.filter(pc.field("request") == request).sort_by("position")
    texts = own["token_text"].slice(max(0, own.num_rows - PROMPT_TAIL)).to_pylist()
    return "".join(text or "" for text in texts)


def _own(table: pa.Table, supports: Supports) -> pa.Table:
    # the rows of the chosen layers and heads
    return table.filter(
        (pc.field("request") == supports.request)
        & pc.field("layer").isin(pa.array(set(supports.layer_U.tolist()), pa.int16()))
        & pc.field("head").isin(pa.array(set(supports.head_U.tolist()), pa.int16()))
    )


def _measured(trace: Trace, supports: Supports) -> dict[int, dict[str, float | None]]:
    table = _own(trace.table("supports", ["request", "step", "layer", "head", *MEASURES]), supports)
    means = table.group_by("step").aggregate([(name, "mean") for name in MEASURES]).to_pylist()
    return {row["step"]: {name: row[f"{name}_mean"] for name in MEASURES} for row in means}


def _refreshes(
    trace: Trace, supports: Supports
) -> dict[int, tuple[npt.NDArray[np.int32], float | None]]:
    columns = ["request", "step", "layer", "head", "lambda_star", "positions"]
    table = _own(trace.table("selections", columns), supports)
    found = {}
    for step in pc.unique(table["step"]).to_pylist():
        own = table.filter(pc.field("step") == step)
        positions = pc.unique(pc.list_flatten(own["positions"])).to_numpy()
        found[step] = (positions, pc.mean(own["lambda_star"]).as_py())
    return found
