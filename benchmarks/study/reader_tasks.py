"""Tasks whose answers take more than finding the question's own words, over real prose; judged by the answer's strings.

The haystack is the study's prose, sentence by sentence. As in `own_tasks`, the lead of an answer ends some tokens
before what is asked for, since the first token follows from the prompt's last position, which every method reads.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.study.texts import text
from sfi_core.measure.evaluation.questions import DocumentTask, Question, depths, seeded
from sfi_core.measure.evaluation.tasks import hide

HELD = 1000  # seeds from here on read the half `held`
FACTS = (  # what is told, what is asked in other words, the answer's lead; {} is the value
    ("The physician keeps her practice in {}.", "Where does the doctor see patients?", "The doctor sees patients in"),
    ("The locksmith drives a {} van.", "What colour is the vehicle of the man who mends locks?", "His vehicle is"),
    ("Our pilot's favourite animal is the {}.", "Which creature does the aviator like most?", "The aviator likes the"),
    ("The orchestra rehearses every {}.", "On which day do the musicians practise?", "The musicians practise on"),
    ("The widow's son became a {}.", "What is the profession of the widow's child?", "The widow's child works as a"),
    ("The ferry leaves from pier {}.", "From which landing place does the boat depart?", "The boat departs from pier"),
)
CITIES = ("Lisbon", "Oslo", "Naples", "Cracow", "Geneva", "Dublin", "Athens", "Bergen")
VALUES: tuple[tuple[str, ...], ...] = (
    CITIES,
    ("purple", "silver", "orange", "turquoise", "crimson", "beige"),
    ("otter", "falcon", "hedgehog", "dolphin", "badger", "heron"),
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Saturday", "Sunday"),
    ("carpenter", "judge", "diver", "tailor", "chemist", "farmer"),
    ("14", "27", "38", "53", "69", "81"),
)
PEOPLE = ("Marta", "Henrik", "Yusuf", "Ingrid", "Paolo", "Nadia", "Oskar", "Leila")
FIRMS = ("Brightwater", "Cobalt", "Dunmore", "Elmcrest", "Foxglove", "Granite", "Hollis", "Ironbridge")
NAMES = ("speed", "limit", "offset", "budget", "margin", "width", "depth", "total", "count", "scale")
GOODS = ("apples", "barrels", "candles", "doors", "engines", "flutes", "gloves", "hammers", "inks", "jars")
DECISIONS = (
    ("the library will open on {} as well", VALUES[3]),
    ("the new bridge will be painted {}", VALUES[1]),
    ("the festival will move to {}", CITIES),
    ("the old mill will be sold to a {}", VALUES[4]),
)


@dataclass(frozen=True, slots=True)
class Reading(DocumentTask):
    """A task over prose: `ask` draws what is hidden in it, the question, the lead and the answers."""

    def question(self, length: int, seed: int, units: int) -> Question:
        """See `DocumentTask`; a unit is a sentence of prose."""
        rng = seeded(self.name, length, seed)
        needles, ask, lead, answers = self.ask(rng)
        sentences = _sentences("held" if seed >= HELD else "dev")
        first = rng.randrange(len(sentences))
        hay = [sentences[(first + index) % len(sentences)] for index in range(units)]
        return Question(f"{hide(needles, hay, depths(seed, len(needles)))}\n\n{ask}", lead, answers)

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """Draw a question."""
        raise NotImplementedError


@cache
def _sentences(half: str) -> list[str]:
    joined = " ".join(text("prose", half).split() + text("narrative", half).split())
    return [sentence for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", joined) if sentence]


@dataclass(frozen=True, slots=True)
class Paraphrase(Reading):
    """Six facts, one asked for in other words."""

    name: str = "paraphrase"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        values = [rng.choice(each) for each in VALUES]
        facts = [fact.format(value) for (fact, _, _), value in zip(FACTS, values, strict=True)]
        asked = rng.randrange(len(FACTS))
        _, ask, lead = FACTS[asked]
        return facts, ask, lead, (values[asked],)


@dataclass(frozen=True, slots=True)
class Several(Reading):
    """Six facts, three of them asked for at once."""

    name: str = "several"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        firms = rng.sample(FIRMS, 6)
        numbers = rng.sample(range(1000, 10_000), len(firms))
        facts = [
            f"The door code of the {firm} office is {number}." for firm, number in zip(firms, numbers, strict=True)
        ]
        asked = firms[:3]
        ask = f"What are the door codes of the offices {', '.join(asked)}, in this order?"
        lead = f"The door codes of {', '.join(asked)} are, in this order:"
        return facts, ask, lead, tuple(str(number) for number in numbers[:3])


@dataclass(frozen=True, slots=True)
class TwoPlaces(Reading):
    """Who works where, and in which town that is: the answer is in two places."""

    name: str = "two-places"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        people, firms, towns = rng.sample(PEOPLE, 3), rng.sample(FIRMS, 3), rng.sample(CITIES, 3)
        facts = [f"{person} works for the company {firm}." for person, firm in zip(people, firms, strict=True)]
        facts += [f"The company {firm} has its only office in {town}." for firm, town in zip(firms, towns, strict=True)]
        ask = f"For which company does {people[0]} work, and in which town is its office? Answer in one sentence."
        return facts, ask, f"{people[0]} works for the company", (firms[0], towns[0])


@dataclass(frozen=True, slots=True)
class Program(Reading):
    """Assignments of a program, scattered; the value of the last of a chain of three is asked for."""

    name: str = "program"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        names, numbers = rng.sample(NAMES, 6), rng.sample(range(1000, 10_000), 2)
        lines = [f"{names[0]} = {numbers[0]}", f"{names[1]} = {names[0]}", f"{names[2]} = {names[1]}"]
        others = [f"{names[3]} = {numbers[1]}", f"{names[4]} = {names[3]}", f"{names[5]} = {names[4]}"]
        facts = [f"The program sets `{line}`." for pair in zip(lines, others, strict=True) for line in pair]
        ask = f"The text sets variables of a program. Which number does print({names[2]}) show? Follow the assignments."
        return facts, ask, f"In the program, `{names[2]}` is set to", (names[1], names[0], str(numbers[0]))


@dataclass(frozen=True, slots=True)
class Counting(Reading):
    """How many people are said to have signed."""

    name: str = "counting"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        count = rng.randint(2, 5)
        signed = rng.sample(PEOPLE, count)
        facts = [f"{person} signed the petition." for person in signed]
        ask = "Who signed the petition? List all names, then say how many they are."
        return facts, ask, "The petition was signed by", tuple(signed)


@dataclass(frozen=True, slots=True)
class Table(Reading):
    """The rows of a table, scattered; the largest is asked for."""

    name: str = "table"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        goods, stock = rng.sample(GOODS, 5), rng.sample(range(100, 1000), 5)
        facts = [f"| {name} | {number} in stock |" for name, number in zip(goods, stock, strict=True)]
        most = max(range(5), key=stock.__getitem__)
        ask = "Rows of a table are scattered in the text. List all goods with their stock, then name the largest stock."
        return facts, ask, "The table says:", (*map(str, stock), f"stock is {goods[most]}")


@dataclass(frozen=True, slots=True)
class Summary(Reading):
    """Decisions of a council in other text, to be summed up; judged by the facts."""

    name: str = "summary"

    def ask(self, rng: random.Random) -> tuple[Sequence[str], str, str, tuple[str, ...]]:
        """See `Reading`."""
        values = [rng.choice(choices) for _, choices in DECISIONS]
        facts = [
            f"The town council decided that {what.format(value)}."
            for (what, _), value in zip(DECISIONS, values, strict=True)
        ]
        ask = "Sum up in one sentence each what the town council decided: library, bridge, festival and mill."
        return facts, ask, "The town council decided four things. First,", tuple(values)


READER = {task.name: task for task in (Paraphrase(), Several(), TwoPlaces(), Program(), Counting(), Table(), Summary())}
