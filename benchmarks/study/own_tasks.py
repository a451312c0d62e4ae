"""Tasks of the study's own: questions about a document that a model of 135 million parameters can answer."""

import random
from dataclasses import dataclass

from sfi_core.bundled.corpus import ADJECTIVES, NAMES, OBJECTS, PLACES
from sfi_core.measure.evaluation.tasks.base import DocumentTask, Question, depths, seeded
from sfi_core.measure.evaluation.tasks.words import filler, hide, take

FACTS = 6  # sentences that tell a fact, one of which is asked for


@dataclass(frozen=True, slots=True)
class Lookup(DocumentTask):
    """A list of `Name: adjective object.` lines; one name's line is asked for. A unit is a line."""

    name: str = "lookup"

    @property
    def least(self) -> int:
        """The fewest lines."""
        return 1

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the list; the line that is asked for walks evenly over it with the seed."""
        rng = seeded(self.name, length, seed)
        names = rng.sample(_names(), units)
        things = [_thing(rng) for _ in names]
        asked = int(depths(seed, 1)[0] * units)
        listed = "\n".join(f"{name}: {thing}" for name, thing in zip(names, things, strict=True))
        ask = f"What does the list say of {names[asked]}?"
        text = f"Here is a list of people and of what each of them bought.\n\n{listed}\n\n{ask}"
        return Question(text, f"{names[asked]}:", (things[asked],))


@dataclass(frozen=True, slots=True)
class Facts(DocumentTask):
    """Six facts in filler, one asked for in the words of its sentence."""

    name: str = "facts"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the facts; the first, which is asked for, walks evenly over the text with the seed."""
        rng = seeded(self.name, length, seed)
        names = rng.sample(NAMES, FACTS)
        things = [_thing(rng) for _ in names]
        told = [
            f"The most precious thing of {name} is the {thing}."
            for name, thing in zip(names, things, strict=True)
        ]
        text = hide(told, take(filler(rng), units), depths(seed, FACTS))
        ask = f"What is the most precious thing of {names[0]}?"
        lead = f"The most precious thing of {names[0]} is the"
        return Question(f"{text}\n\n{ask}", lead, (things[0],))


@dataclass(frozen=True, slots=True)
class Places(DocumentTask):
    """Where each of a few people lives, in filler; all that are asked for are told."""

    name: str = "places"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw three people and their places, of whom one is asked for."""
        rng = seeded(self.name, length, seed)
        names, places = rng.sample(NAMES, 3), rng.sample(PLACES, 3)
        told = [
            f"{name} lives in the {place} and nowhere else."
            for name, place in zip(names, places, strict=True)
        ]
        text = hide(told, take(filler(rng), units), depths(seed, len(told)))
        ask = f"Where does {names[0]} live?"
        return Question(f"{text}\n\n{ask}", f"{names[0]} lives in the", (places[0],))


OWN = {task.name: task for task in (Lookup(), Facts(), Places())}


def _names() -> list[str]:
    return [f"{first} {second}" for first in NAMES[::7] for second in NAMES[3::11]]


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
