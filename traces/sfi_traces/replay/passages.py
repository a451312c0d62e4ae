"""The passages of the context that a step reads, with text and attention mass."""

from dataclasses import dataclass

import numpy as np

from sfi_traces.replay.playback import Playback
from sfi_traces.views.words import passage_edges

SINK, SELECTED, RECENT = "sink", "selected", "recent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Consecutive tokens that a step reads.

    Attributes:
        kind: "sink", "selected" or "recent".
        end: Position after the last token.
        share: Share of the passage's (token, layer, KV head) triples that are read; 0 to 1.
        mass: Share of the step's dense attention on the passage's read positions, 0 to 1; None without an
            audit.
        text: The tokens; "" in a redacted trace.
    """

    kind: str
    first: int
    end: int
    share: float
    mass: float | None
    text: str


def passages(playback: Playback, step: int, most: int = 40) -> list[Passage]:
    """Return what a step reads: the sink, up to `most` selected passages, the recent tokens.

    A slow step reads all of the context; its selected passages are those that the following fast steps read.
    Passages are sorted by mass, or without an audit by share, greatest first.
    """
    memory = playback.memory
    length, start = int(memory.length_N[step]), int(memory.start_N[step])
    sets = playback.in_force(step)
    position = np.concatenate([*sets.values(), np.zeros(0, np.int32)])
    count_T = np.bincount(position, minlength=length)[:length].astype(np.float64)
    mass_T = None
    if playback.audited(step):
        at, mass = playback.read_support(step)
        mass_T = np.bincount(at, mass, minlength=length)[:length]

    def passage(kind: str, first: int, end: int, share: float) -> Passage:
        mass = None if mass_T is None else float(mass_T[first:end].sum())
        text = "".join(playback.words[first:end])
        return Passage(kind=kind, first=first, end=end, share=share, mass=mass, text=text)

    between = memory.sink + np.flatnonzero(count_T[memory.sink : start])
    chosen = [
        (float(count_T[first : last + 1].sum()) / (len(sets) * (last + 1 - first)), first, last + 1)
        for first, last in passage_edges(between.tolist(), playback.words)
    ]
    weight = mass_T if mass_T is not None else count_T
    chosen.sort(key=lambda one: (-weight[one[1] : one[2]].sum(), one[1]))
    return [
        *([passage(SINK, 0, memory.sink, 1.0)] if memory.sink else []),
        *(passage(SELECTED, first, end, share) for share, first, end in chosen[:most]),
        *([passage(RECENT, start, length, 1.0)] if start < length else []),
    ]
