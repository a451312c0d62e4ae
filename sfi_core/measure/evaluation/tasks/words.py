"""Names and filler sentences for the tasks, from the bundled corpus's word lists."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from sfi_core.bundled.corpus import NAMES, sentence


def full_names(rng: random.Random, count: int) -> list[str]:
    """Draw different names of two words, such as ``Belora Tamvex``; there are about a million."""
    drawn = rng.sample(range(len(NAMES) ** 2), count)
    return [f"{NAMES[index // len(NAMES)]} {NAMES[index % len(NAMES)]}" for index in drawn]


def filler(rng: random.Random) -> Iterator[str]:
    """Yield sentences without end, such as ``Belora hid a red lantern under the old bridge.``."""
    while True:
        yield sentence(rng, rng.choice(NAMES), ".").strip()


def paragraphs(sentences: Sequence[str], size: int = 5) -> str:
    """Join sentences into paragraphs of `size`."""
    rows = [sentences[start : start + size] for start in range(0, len(sentences), size)]
    return "\n".join(" ".join(row) for row in rows)


def hide(needles: Sequence[str], sentences: Sequence[str], depths: Sequence[float]) -> str:
    """Put each needle into the text of `sentences`, at its relative depth."""
    places = [int(depth * (len(sentences) + 1)) for depth in depths]
    mixed: list[str] = []
    for index in range(len(sentences) + 1):
        mixed += [n for n, place in zip(needles, places, strict=True) if place == index]
        mixed += sentences[index : index + 1]
    return paragraphs(mixed)


def take(sentences: Iterator[str], count: int) -> list[str]:
    """Return the first `count` sentences."""
    return list(islice(sentences, count))
