"""The passages that a step reads, as the player shows them."""

from typing import Any

import numpy as np
from rich.text import Text

from sfi_cli.commands.trace.replay.frame_view import printable
from sfi_cli.commands.trace.replay.text_pane import (
    AHEAD,
    BACKGROUND,
    CURRENT,
    OTHER,
    PAST,
    PLAIN,
    RECENT,
    SELECTED,
    SENTENCE,
    SINK,
    SLOW,
    UNREAD,
    Marks,
)

LONGEST = 240  # characters of a passage
KINDS = {"sink": SINK, "selected": SELECTED, "recent": RECENT, "all": SELECTED}


def passage_text(passage: Any) -> Text:
    """Write a passage: its kind, its positions, the share that is read, its mass and its text."""
    mass = "" if passage.mass is None else f"  mass {passage.mass:.3f}"
    share = "" if passage.part != "selected" else f"  in {passage.share:.0%}"
    kind = Text(f" {passage.part} ", style=f"on {BACKGROUND[KINDS[passage.part]]}")
    head = Text.assemble(kind, f" {passage.first:,}-{passage.last:,}{share}{mass}")
    text = " ".join(printable(passage.text).split())
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return head.append(f"\n{text}") if text else head


def marks_at(playback: Any, step: int) -> Marks:
    """Mark the tokens for a step; a slow step reads all, so none is marked as read."""
    prompt = len(playback.prompt)
    size = prompt + playback.steps
    place = np.full(size, AHEAD, np.int8)
    place[: prompt + step] = PAST
    place[prompt + playback.sentence_begin(step) : prompt + step] = SENTENCE
    place[prompt + step] = CURRENT
    told = np.full(size, PLAIN, np.int8)
    told[prompt + np.array(playback.slow_at, int)] = SLOW if len(playback.slow_at) < playback.steps else PLAIN
    told[prompt + np.array(playback.recorded.disagreeing, int)] = OTHER
    read = np.full(size, UNREAD, np.int8)
    memory = playback.memory
    if not memory.slow_N[step]:
        read[: memory.sink] = SINK
        for positions in playback.in_force(step).values():
            read[positions] = SELECTED
        read[memory.start_N[step] : memory.length_N[step]] = RECENT
    return Marks(place_T=place, read_T=read, told_T=told)


def tokens_of(playback: Any) -> list[str]:
    """Return the texts of prompt and generated tokens; a redacted token is its step's number."""
    generated = [f" {step}" if text is None else text for step, text in enumerate(playback.texts)]
    return [*playback.prompt, *generated]
