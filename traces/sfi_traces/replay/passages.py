"""The passages of the context that a step reads, with their text and their share of the attention.

Paper gap: what a passage is. Positions at most `GAP` apart are one; a longer one than `LONGEST` is cut, so
that its pieces can be told apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sfi_traces.replay.playback import Playback

GAP, LONGEST = 2, 32  # tokens between two positions of a passage; tokens of a passage
SINK, SELECTED, RECENT = "sink", "selected", "recent"

Ints = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Consecutive tokens that a step reads.

    Attributes:
        kind: "sink", "selected" or "recent".
        first: Position of the first token.
        end: Position after the last.
        share: Share of the (token, layer, KV head) triples of the passage that are read; 0 to 1.
        mass: Share of the step's dense attention, 0 to 1; None for a step without an audit.
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

    A slow step reads all of the context; its selected passages are those that it selected, which the fast
    steps after it read. They come by mass, or where there is no audit by share, the greatest first.
    """
    memory = playback.memory
    length, start = int(memory.length_N[step]), int(memory.start_N[step])
    sets = playback.in_force(step)
    position = np.concatenate([*sets.values(), np.zeros(0, np.int32)])
    count_T = np.bincount(position, minlength=length)[:length].astype(np.float64)
    mass_T = None
    if playback.audited(step):
        at, mass = playback.support(step)
        mass_T = np.bincount(at, mass, minlength=length)[:length]

    def passage(kind: str, first: int, end: int, share: float) -> Passage:
        mass = None if mass_T is None else float(mass_T[first:end].sum())
        text = _text(playback, first, end)
        return Passage(kind=kind, first=first, end=end, share=share, mass=mass, text=text)

    chosen = [
        (float(count_T[first:end].sum()) / (len(sets) * (end - first)), first, end)
        for first, end in _runs(np.flatnonzero(count_T))
    ]
    weight = mass_T if mass_T is not None else count_T
    chosen.sort(key=lambda one: (-weight[one[1] : one[2]].sum(), one[1]))
    return [
        *([passage(SINK, 0, memory.sink, 1.0)] if memory.sink else []),
        *(passage(SELECTED, first, end, share) for share, first, end in chosen[:most]),
        *([passage(RECENT, start, length, 1.0)] if start < length else []),
    ]


def _runs(position_P: Ints) -> list[tuple[int, int]]:
    # the first position and the one after the last of each passage
    if not len(position_P):
        return []
    breaks = np.flatnonzero(np.diff(position_P) > GAP) + 1
    found = []
    for run in np.split(position_P, breaks):
        first, end = int(run[0]), int(run[-1]) + 1
        found += [(at, min(at + LONGEST, end)) for at in range(first, end, LONGEST)]
    return found


def _text(playback: Playback, first: int, end: int) -> str:
    prompt = playback.prompt
    generated = playback.texts[max(0, first - len(prompt)) : max(0, end - len(prompt))]
    return "".join([*prompt[first:end], *(text or "" for text in generated)])
