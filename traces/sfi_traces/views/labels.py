"""Colors and tokens, the same in `sfi trace plot` and in `sfi trace report`."""

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np

from sfi_traces.views.figure_data import REST
from sfi_traces.views.raster import MISSED, READ, SELECTED
from sfi_traces.views.view import Steps

LONGEST = 14  # characters of a label
SIDES: Final = ("left", "right")
# colors that stand out from white and from black
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


def printable(text: str) -> str:
    """Write a line break, and all else that does not print, as Python would."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible(text: str, longest: int = LONGEST) -> str:
    """Write a token so that a line of a figure shows it: no line break, no lone blank, not too long."""
    shown = printable(text)
    shown = shown.strip() or "␣" * len(shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def step_ticks(steps: Steps, step: np.ndarray, most: int) -> tuple[list[int], list[str]]:
    """Choose the labels of an axis that has an entry for each of some steps.

    Up to `most` entries are all labeled, each with its step's token. More are labeled where a sentence
    begins, with its first words, as far as the labels keep their distance. A redacted trace has the
    numbers of steps.

    Args:
        steps: The request's steps.
        step: Steps of the axis.
        most: Labels that the axis has room for.

    Returns:
        Entries of the axis, and their labels.
    """
    rows = steps.rows(step)
    if len(step) <= most:
        return list(range(len(step))), [_token(steps, row) for row in rows]
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
    """Choose up to about `most` entries whose steps are round, or follow a round number; and their labels."""
    unit = next(unit for unit in _units() if (step[-1] - step[0]) / unit <= most)
    round_steps = np.arange(-(-step[0] // unit) * unit, step[-1] + 1, unit)
    entries = np.unique(np.searchsorted(step, round_steps)).tolist()
    return entries, [str(step[entry]) for entry in entries]


def _units() -> Iterator[int]:
    # 1, 2, 5, 10, 20, 50, ...
    return (digit * 10**zeros for zeros in itertools.count() for digit in (1, 2, 5))


def _token(steps: Steps, row: int) -> str:
    return visible(steps.text[row]) or str(steps.step[row])


def _sentence(steps: Steps, row: int) -> str:
    # the first words, though the sentence's first step may be one that the axis does not have
    begin, end = (np.searchsorted(steps.sentence, steps.sentence[row], side) for side in SIDES)
    words = visible("".join(steps.text[begin : min(end, begin + LONGEST)]), LONGEST + 6)
    return f"{steps.step[row]}  {words}".strip()
