"""A recorded run step by step, as plain data for a player; rows are read when their step is shown."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.memory import Memory
from sfi_traces.model.rows import Rows
from sfi_traces.model.supports import check_known
from sfi_traces.read.reader import Place, Trace, of_request
from sfi_traces.read.shares import even_shares
from sfi_traces.replay.frames import Frame, Marks, Numbers, Strip
from sfi_traces.replay.setting import Setting
from sfi_traces.schema import AHEAD

PROMPT_TAIL = 400  # tokens of the prompt before the generated text
REDACTED = "(the trace has no text)"
MEASURES = ("retained_mass", "overlap_previous_step", "overlap_last_refresh")
STEPS = (
    "step", "token_text", "slow", "reason", "steps_since_slow", "sentence", "attended_tokens",
    "context_tokens",
)  # fmt: skip

Ints = npt.NDArray[np.integer[Any]]


class Playback:
    """One request of a trace; values are means over the chosen layers and KV heads.

    Attributes:
        places: Layers and KV heads that may be chosen.
        chosen: The layers and KV heads that are shown.
        memory: Sizes of the request's memory.
        texts: The generated tokens; None in a redacted trace.
        slow_at: The slow steps.
    """

    def __init__(self, trace: Trace, request: int, rows: pa.Table, *, audited: bool) -> None:
        """Take the steps of a request.

        Raises:
            TraceError: `audited`, and no layer that fast steps change was audited; or unknown settings.
        """
        self.trace, self.request = trace, request
        self._rows = rows
        self._sentence = rows["sentence"].to_numpy()
        self.texts: list[str | None] = rows["token_text"].to_pylist()
        slow = rows["slow"].to_numpy()
        self.slow_at: list[int] = np.flatnonzero(slow).tolist()
        config = Setting.recorded(trace).config
        self.memory = Memory.of(
            config.to_dict(), slow, rows["context_tokens"].to_numpy().astype(np.int64)
        )
        measured = ("layer", "head", "positions", "mass", "read", *MEASURES)
        self._supports = Rows(trace, "supports", request, measured)
        self._selections = Rows(
            trace, "selections", request, ("layer", "head", "lambda_star", "positions", "reason")
        )
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
        """Open one request, by default the first, of a trace.

        `layers` and `heads` limit what is shown; `audited` refuses a trace without an audit, which has no
        strips.

        Raises:
            TraceError: The trace has no step, no audit, or is of a lossless run.
            ConfigError: No such request, layer or head.
        """
        if audited or trace.lossless:
            trace.require_audit()
        steps = trace.table("steps", ["request", *STEPS])
        known = sorted(pc.unique(steps["request"]).to_pylist())
        if not known:
            raise TraceError(f"trace {trace.path} has no finished step")
        if request is not None:
            check_known("request", [request], known)
        own = known[0] if request is None else request
        playback = cls(trace, own, of_request(steps, own).sort_by("step"), audited=audited)
        playback.choose(layers, heads)
        playback.places = playback.chosen
        return playback

    def choose(
        self, layers: Collection[int] | None = None, heads: Collection[int] | None = None
    ) -> None:
        """Show these layers and KV heads from now on; None for all.

        Raises:
            ConfigError: No such layer or head.
        """
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
        table = self.trace.table("prompts", ["request", "position", "token_text"])
        own = of_request(table, self.request).sort_by("position")
        texts = [text or "" for text in own["token_text"].to_pylist()]
        return [""] * (int(self.memory.length_N[0]) - len(texts)) + texts

    @cached_property
    def words(self) -> list[str]:
        """The prompt's and the generated tokens by position; empty where the trace has no text."""
        return [*self.prompt, *(text or "" for text in self.texts)]

    def frame(self, step: int) -> Frame:
        """Return what is shown of a step."""
        row = self._rows.slice(step, 1).to_pylist()[0]
        first = self.sentence_begin(step)
        texts = [text or "" for text in self.texts[: step + 1]]
        tail = "".join(self.prompt[-PROMPT_TAIL:])
        return Frame(
            step=step,
            before=REDACTED if row["token_text"] is None else tail + "".join(texts[:first]),
            sentence="".join(texts[first:step]),
            token=texts[step],
            slow=row["slow"],
            reason=row["reason"],
            steps_since_slow=row["steps_since_slow"],
            sentence_index=row["sentence"],
            attended_tokens=row["attended_tokens"],
            context_tokens=row["context_tokens"],
            audited=self.audited(step),
            measures=_means(self._supports.at(step), MEASURES),
            lambda_star=_means(self._selections.at(step), ["lambda_star"])["lambda_star"],
        )

    def sentence_begin(self, step: int) -> int:
        """Return the first step of a step's sentence."""
        return int(np.argmax(self._sentence == self._sentence[step]))

    def strip(self, step: int, width: int) -> Strip:
        """Return a step's context in `width` bins; the audited step before is put into the same bins."""
        length = int(self.memory.length_N[step])
        mass = self._mass(step, width, length)
        earlier = self._supports.last(step - 1)
        old = mass if earlier is None else self._mass(earlier, width, length)
        lit, was_lit = mass > 1 / width, old > 1 / width
        bins = np.arange(length) * width // length
        audited = self.audited(step)
        return Strip(
            mass=mass,
            added=lit & ~was_lit & audited,
            removed=was_lit & ~lit & audited,
            sink=_marked(bins[: self.memory.sink], width),
            recent=_marked(bins[self.memory.start_N[step] :], width),
            selected=_marked(bins[np.unique(self.selected(step))], width),
        )

    def audited(self, step: int) -> bool:
        """Say whether a step has a support."""
        return self._supports.last(step) == step

    def support(self, step: int) -> tuple[Ints, Numbers]:
        """Return all positions of a step's supports, and their shares of the mean attention."""
        rows = self._supports.at(step)
        if not len(rows):
            return np.zeros(0, np.int32), np.zeros(0)
        rows = even_shares(rows)  # an import may have no masses
        position, mass = (pc.list_flatten(rows[name]).to_numpy() for name in ("positions", "mass"))
        return position, mass.astype(np.float64) / len(self.chosen)

    def read_support(self, step: int) -> tuple[Ints, Numbers]:
        """Return the part of `support` whose layer and KV head read the position."""
        position, mass = self.support(step)
        rows = self._supports.at(step)
        memory = self.memory
        if memory.slow_N[step] or not len(rows):
            return position, mass
        if not rows["read"].null_count:
            read = pc.list_flatten(rows["read"]).to_numpy()
        else:
            size = pc.fill_null(pc.list_value_length(rows["positions"]), 0).to_numpy()
            place = zip(rows["layer"].to_pylist(), rows["head"].to_pylist(), strict=True)
            sets, none = self.in_force(step), np.zeros(0, np.int32)
            pieces = np.split(position, np.cumsum(size)[:-1])
            read = np.concatenate(
                [np.isin(own, sets.get(key, none)) for key, own in zip(place, pieces, strict=True)]
            )
            read |= (position < memory.sink) | (position >= memory.start_N[step])
        return position[read], mass[read]

    def selected(self, step: int) -> Ints:
        """Return the positions that the last refresh selected, in all chosen layers and heads."""
        refresh = self._selections.last(step)
        if refresh is None:
            return np.zeros(0, np.int32)
        found: Ints = pc.list_flatten(self._selections.at(refresh)["positions"]).to_numpy()
        return found

    def in_force(self, step: int) -> dict[Place, Ints]:
        """Return the positions that each layer and KV head reads at a step, by its last selection.

        Mostly that of the last slow step, or of this one if it is slow. FreeKV also selects for single heads
        in between, and ahead of the step that reads the selection.
        """
        behind = bisect_right(self.slow_at, step)
        slow = self.slow_at[behind - 1] if behind else 0
        found: dict[Place, Ints] = {}
        at = self._selections.last(step)
        while at is not None and at >= slow and len(found) < len(self.chosen):
            found = _sets(self._selections.at(at), ahead=at < step) | found
            at = self._selections.last(at - 1)
        return found

    def _places(self, *, audited: bool) -> list[Place]:
        dense = set(self.trace.manifest["config"]["dense_layers"])
        recorded = self._supports.places()
        if not recorded and not audited:
            recorded = self._selections.places() or [
                (layer["layer"], head)
                for layer in self.trace.manifest["model"]["layers"]
                if layer["window"] is None
                for head in range(layer["heads"])
            ]
        places = [place for place in recorded if place[0] not in dense]
        if not places:
            raise TraceError(
                f"trace {self.trace.path} has no audited step of a layer that fast steps change"
            )
        return places

    def _mass(self, step: int, width: int, length: int) -> Numbers:
        position, mass = self.support(step)
        bins = position.astype(np.int64) * width // length
        found: Numbers = np.bincount(bins, mass, minlength=width).astype(np.float64)
        return found


def _sets(rows: pa.Table, *, ahead: bool) -> dict[Place, Ints]:
    # positions by layer and KV head; `ahead` includes selections that serve the next step
    if not ahead and len(rows):
        rows = rows.filter(pc.not_equal(rows["reason"], AHEAD))
    if not len(rows):
        return {}
    place = zip(rows["layer"].to_pylist(), rows["head"].to_pylist(), strict=True)
    lists = rows["positions"].combine_chunks()
    size = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    return dict(zip(place, np.split(lists.flatten().to_numpy(), np.cumsum(size)[:-1]), strict=True))


def _means(rows: pa.Table, names: Sequence[str]) -> dict[str, float | None]:
    return {name: pc.mean(rows[name]).as_py() if len(rows) else None for name in names}


def _marked(bins: Ints, width: int) -> Marks:
    marks = np.zeros(width, np.bool_)
    marks[bins] = True
    return marks
