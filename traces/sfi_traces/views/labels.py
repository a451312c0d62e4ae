"""Colors and token labels, shared by `sfi trace plot` and `sfi trace report`."""

import itertools
from typing import Final

import numpy as np

from sfi_core.machine.text import printable
from sfi_traces.model.steps import Steps
from sfi_traces.views.figure_data import REST
from sfi_traces.views.raster import MISSED, READ, SELECTED

LONGEST = 14  # characters of a label
SIDES: Final = ("left", "right")
# colors visible on white and on black
SLOW, WITHIN, ACROSS, CLIP, SEGMENT = "#d1495b", "#2f7fc1", "#e08a2e", "#8a94a0", "#3aa17e"
RASTER = {SELECTED: "#e8b878", READ: "#2f7fc1", MISSED: "#d1495b"}
PHASES = {
    "attention.fast": "#2f7fc1",
    "attention.dense": "#d1495b",
    "attention.mixed": "#8e6bbf",
    "selector": "#e08a2e",
    "top_k": "#c9a227",
    "pack": "#3aa17e",
    "append": "#2aa5b8",
    "sample": "#b5739d",
    REST: "#bcc5cf",
}


def visible(text: str, longest: int = LONGEST) -> str:
    """Write a token for a figure: no line break, no lone blank, at most `longest` characters."""
    shown = printable(text)
    shown = shown.strip() or "␣" * len(shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def step_ticks(steps: Steps, step: np.ndarray, most: int) -> tuple[list[int], list[str]]:
    """Choose labels for an axis with an entry for each step in `step`; return entries and labels.

    Up to `most` entries are all labeled with their step's token. More are labeled at beginnings of sentences,
    with the first words, as far apart as `most` labels would be. A redacted trace has step numbers.
    """
    rows = steps.rows(step)
    if len(step) <= most:
        return list(range(len(step))), [visible(steps.text[row]) or str(steps.step[row]) for row in rows]
    if not any(steps.text):
        return number_ticks(step, most)
    room = len(step) / most
    sentence = steps.sentence[rows]
    kept: list[int] = []
    for entry in np.flatnonzero(np.diff(sentence, prepend=sentence[0] - 1)):
        if not kept or entry - kept[-1] >= room:
            kept.append(int(entry))
    return kept, [_sentence(steps, rows[entry]) for entry in kept]


def number_ticks(step: np.ndarray, most: int) -> tuple[list[int], list[str]]:
    """Choose up to about `most` entries at or after round step numbers; return entries and labels."""
    units = (digit * 10**zeros for zeros in itertools.count() for digit in (1, 2, 5))
    unit = next(unit for unit in units if (step[-1] - step[0]) / unit <= most)
    round_steps = np.arange(-(-step[0] // unit) * unit, step[-1] + 1, unit)
    entries = np.unique(np.searchsorted(step, round_steps)).tolist()
    return entries, [str(step[entry]) for entry in entries]


def _sentence(steps: Steps, row: int) -> str:
    # the sentence's first words, also if the axis lacks its first step
    begin, end = (np.searchsorted(steps.sentence, steps.sentence[row], side) for side in SIDES)
    words = visible("".join(steps.text[begin : min(end, begin + LONGEST)]), LONGEST + 6)
    return f"{steps.step[row]}  {words}".strip()
