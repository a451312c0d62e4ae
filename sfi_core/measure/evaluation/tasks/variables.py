"""Variable tracking: find all variables that have a value through a chain (after RULER, 2404.06654).

``VAR QXBLR = 48213.``, further on ``VAR TMHEA = VAR QXBLR.`` and so on; a second chain starts from another
value. Score: the share of the asked chain's variables in the answer.
"""

import random
import string
from dataclasses import dataclass

from sfi_core.measure.evaluation.tasks.base import DocumentTask, Question, seeded
from sfi_core.measure.evaluation.tasks.words import filler, hide, take

CHAINS, VARIABLES = 2, 5
INSTRUCTION = (
    "In the text below, variables are assigned values, some of them by way of other variables. "
    "Follow the assignments; a question about them follows the text."
)


@dataclass(frozen=True, slots=True)
class VariableTracking(DocumentTask):
    """Chains of five variables in filler; the question is about one chain."""

    name: str = "variable-tracking"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the chains; the assignments of a chain stand in order, anywhere in the text."""
        rng = seeded(self.name, length, seed)
        names = variables(rng, CHAINS * VARIABLES)
        values = rng.sample(range(10_000, 100_000), CHAINS)
        needles: list[str] = []
        places: list[float] = []
        for chain, value in enumerate(values):
            own = names[chain * VARIABLES : (chain + 1) * VARIABLES]
            sources = [str(value), *(f"VAR {name}" for name in own)]
            needles += [f"VAR {name} = {sources[i]}." for i, name in enumerate(own)]
            places += sorted(rng.random() for _ in own)
        text = hide(needles, take(filler(rng), units), places)
        ask = f"Which {VARIABLES} variables have the value {values[0]}, directly or through others?"
        lead = f"The variables with the value {values[0]} are"
        return Question(f"{INSTRUCTION}\n\n{text}\n\n{ask}", lead, tuple(names[:VARIABLES]))


def variables(rng: random.Random, count: int) -> list[str]:
    """Draw different names of five capitals."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
