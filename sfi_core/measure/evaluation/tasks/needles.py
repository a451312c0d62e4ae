"""Needles in a haystack: find one or several numbers in a long text (after RULER, 2404.06654).

``The secret number of Belora Tamvex is 1234567.`` Score: the share of the expected numbers in the answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sfi_core.measure.evaluation.tasks.base import DocumentTask, Question, depths, seeded
from sfi_core.measure.evaluation.tasks.words import filler, full_names, hide, take

INSTRUCTION = (
    "The text below mentions secret numbers of some people. Read it with care and keep the numbers "
    "in mind; a question about them follows the text."
)
NUMBERS = range(1_000_000, 10_000_000)  # seven digits each, so that no number is part of another
DECOY_EVERY = 4  # sentences of the haystack for each decoy


@dataclass(frozen=True, slots=True)
class Needles(DocumentTask):
    """A family of needle tasks.

    Attributes:
        values: Numbers told of each of these people, one a sentence.
        decoys: Whether the haystack tells numbers of many other people.
    """

    keys: int = 1
    values: int = 1
    decoys: bool = False

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw a haystack with its needles at the seed's `depths`."""
        rng = seeded(self.name, length, seed)
        count = self.keys * self.values
        drawn = rng.sample(NUMBERS, count)
        names = full_names(rng, self.keys)
        needles = [tell(names[index % self.keys], value) for index, value in enumerate(drawn)]
        hay = self._with_decoys(rng, set(names)) if self.decoys else filler(rng)
        text = hide(needles, take(hay, units), depths(seed, count))
        who = ", ".join(names)
        ask = (
            f"What is the secret number of {who}, as the text above tells it?"
            if count == 1
            else f"What are all the secret numbers of {who}, as the text above tells them?"
        )
        lead = f"The secret number{'s' * (count > 1)} of {who} {'are' if count > 1 else 'is'}"
        answers = tuple(str(value) for value in drawn)
        return Question(f"{INSTRUCTION}\n\n{text}\n\n{ask}", lead, answers)

    def _with_decoys(self, rng: random.Random, taken: set[str]) -> Iterator[str]:
        plain = filler(rng)
        while True:
            yield from take(plain, DECOY_EVERY - 1)
            (name,) = full_names(rng, 1)
            if name not in taken:
                yield tell(name, rng.choice(NUMBERS))


def tell(name: str, value: int) -> str:
    """Write a needle."""
    return f"The secret number of {name} is {value}."
