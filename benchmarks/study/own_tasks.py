"""Tasks of the study's own: questions about a document that a model of 135 million parameters can answer.

The first generated token follows from the prompt's last position, which every method reads densely. So the
lead of an answer ends some tokens before what is asked for.
"""

from dataclasses import dataclass

from sfi_core.bundled.example import NAMES, PLACES
from sfi_core.measure.evaluation.questions import DocumentTask, Question, depths, seeded
from sfi_core.measure.evaluation.tasks import filler, hide, take

SUBJECTS = (
    "the telephone number of the doctor",
    "the code of the north gate",
    "the price of the grand piano",
    "the number of the night train",
    "the year of the great flood",
    "the height of the radio mast",
)
NUMBERS = range(1000, 10_000)  # the filler has no number


@dataclass(frozen=True, slots=True)
class Facts(DocumentTask):
    """Six numbers of different things in filler, one asked for in the words of its sentence."""

    name: str = "facts"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the facts; the one that is asked for walks evenly over the text with the seed."""
        rng = seeded(self.name, length, seed)
        subjects = rng.sample(SUBJECTS, len(SUBJECTS))
        values = [str(number) for number in rng.sample(NUMBERS, len(SUBJECTS))]
        facts = [f"{_upper(subject)} is {value}." for subject, value in zip(subjects, values, strict=True)]
        text = hide(facts, take(filler(rng), units), depths(seed, len(facts)))
        ask = f"What is {subjects[0]}?"
        return Question(f"{text}\n\n{ask}", _upper(subjects[0]), (values[0],))


@dataclass(frozen=True, slots=True)
class Places(DocumentTask):
    """Where each of a few people lives, in filler; all that are asked for are told."""

    name: str = "places"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw three people and their places, of whom one is asked for."""
        rng = seeded(self.name, length, seed)
        names, places = rng.sample(NAMES, 3), rng.sample(PLACES, 3)
        facts = [f"{name} lives in the {place} and nowhere else." for name, place in zip(names, places, strict=True)]
        text = hide(facts, take(filler(rng), units), depths(seed, len(facts)))
        ask = f"Where does {names[0]} live?"
        return Question(f"{text}\n\n{ask}", names[0], (places[0],))


OWN = {task.name: task for task in (Facts(), Places())}


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
