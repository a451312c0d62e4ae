"""Common words: name the ten words that a long list repeats most (after RULER, 2404.06654).

The ten occur at least ten times as often as any other word. Score: the share of them in the answer.
"""

from dataclasses import dataclass

from sfi_core.bundled.corpus import ADJECTIVES, OBJECTS, PLACE_ADJECTIVES, PLACES, VERBS
from sfi_core.measure.evaluation.tasks.base import DocumentTask, Question, seeded

ASKED, RATIO = 10, 10
INSTRUCTION = (
    "Below is a numbered list of words. Some words stand in it far more often than the others. "
    "Keep count of them; a question about them follows the list."
)
_ALL = sorted({*ADJECTIVES, *OBJECTS, *PLACE_ADJECTIVES, *PLACES, *VERBS})
# no word is part of another, which the score would find in it
WORDS = tuple(word for word in _ALL if sum(word in other for other in _ALL) == 1)


@dataclass(frozen=True, slots=True)
class CommonWords(DocumentTask):
    """A list in which ten words are frequent and all others rare; a unit is an entry."""

    name: str = "common-words"

    @property
    def least(self) -> int:
        """The fewest entries in which the ten words are ten times as frequent as any other."""
        return ASKED * RATIO + ASKED

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the list; a longer list repeats all words more often."""
        rng = seeded(self.name, length, seed)
        words = rng.sample(WORDS, len(WORDS))
        common, rare = words[:ASKED], words[ASKED:]
        times = -(-units // (ASKED * RATIO + len(rare)))  # most occurrences of a rare word
        entries = common * (RATIO * times)
        left = units - len(entries)
        entries += (rare * times)[:left]
        rng.shuffle(entries)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
        ask = f"Which {ASKED} words stand most often in the list above?"
        lead = f"The {ASKED} words that stand most often in the list are"
        return Question(f"{INSTRUCTION}\n\n{listed}\n\n{ask}", lead, tuple(common))
