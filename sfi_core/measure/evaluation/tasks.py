"""The built-in tasks; needles, variables and common words are after RULER (2404.06654)."""

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sfi_core.bundled import example as corpus
from sfi_core.errors import InputError, unknown
from sfi_core.measure.evaluation.questions import DocumentTask, Question, TaskSample, depths, seeded

NUMBERS = range(1_000_000, 10_000_000)  # seven digits each, so that no number is part of another
DECOY_EVERY = 4  # sentences of the haystack for each decoy
CHAINS, VARIABLES = 2, 5
ASKED, RATIO = 10, 10
ROOM = 5  # tokens beyond the right answer, to notice an answer that does not end
SENTENCE = 11  # tokens; a document is cut by whole sentences
LONGEST = 10_600  # tokens; the largest document has a thousand people
NEEDLES = (
    "The text below mentions secret numbers of some people. Read it with care and keep the numbers "
    "in mind; a question about them follows the text."
)
ASSIGNMENTS = (
    "In the text below, variables are assigned values, some of them by way of other variables. "
    "Follow the assignments; a question about them follows the text."
)
LISTED = (
    "Below is a numbered list of words. Some words stand in it far more often than the others. "
    "Keep count of them; a question about them follows the list."
)
RECALLED = (
    "Each sentence of the text below is about another person. You will be asked to repeat some of "
    "the sentences word for word."
)
_ALL = sorted({*corpus.ADJECTIVES, *corpus.OBJECTS, *corpus.PLACE_ADJECTIVES, *corpus.PLACES, *corpus.VERBS})
# no word is part of another, which the score would find in it
WORDS = tuple(word for word in _ALL if sum(word in other for other in _ALL) == 1)


@dataclass(frozen=True, slots=True)
class Needles(DocumentTask):
    """Numbers to find in a haystack, told in sentences such as ``The secret number of Belora Tamvex is 1234567.``."""

    keys: int = 1
    values: int = 1  # numbers told of each of these people, one a sentence
    decoys: bool = False  # whether the haystack tells numbers of many other people

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
        return Question(f"{NEEDLES}\n\n{text}\n\n{ask}", lead, answers)

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


@dataclass(frozen=True, slots=True)
class VariableTracking(DocumentTask):
    """Chains of five variables in filler, ``VAR QXBLR = 48213.``, ``VAR TMHEA = VAR QXBLR.``; one is asked about."""

    name: str = "variable-tracking"

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the chains; the assignments of a chain stand in order, anywhere in the text."""
        rng = seeded(self.name, length, seed)
        names = variables(rng, CHAINS * VARIABLES)
        values = rng.sample(range(10_000, 100_000), CHAINS)
        needles: list[str] = []
        places: list[float] = []
        for chain, value in enumerate(values):
            linked = names[chain * VARIABLES : (chain + 1) * VARIABLES]
            sources = [str(value), *(f"VAR {name}" for name in linked)]
            needles += [f"VAR {name} = {sources[i]}." for i, name in enumerate(linked)]
            places += sorted(rng.random() for _ in linked)
        text = hide(needles, take(filler(rng), units), places)
        ask = f"Which {VARIABLES} variables have the value {values[0]}, directly or through others?"
        lead = f"The variables with the value {values[0]} are"
        return Question(f"{ASSIGNMENTS}\n\n{text}\n\n{ask}", lead, tuple(names[:VARIABLES]))


def variables(rng: random.Random, count: int) -> list[str]:
    """Draw different names of five capitals."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)


@dataclass(frozen=True, slots=True)
class CommonWords(DocumentTask):
    """A list in which ten words occur ten times as often as any other; a unit is an entry."""

    name: str = "common-words"
    least: int = ASKED * RATIO + ASKED  # in fewer entries no ten words are ten times as frequent as any other

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the list; a longer list repeats all words more often."""
        rng = seeded(self.name, length, seed)
        words = rng.sample(WORDS, len(WORDS))
        common, rare = words[:ASKED], words[ASKED:]
        times = -(-units // (ASKED * RATIO + len(rare)))  # most occurrences of a rare word
        entries = common * (RATIO * times)
        entries += (rare * times)[: units - len(entries)]
        rng.shuffle(entries)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
        ask = f"Which {ASKED} words stand most often in the list above?"
        lead = f"The {ASKED} words that stand most often in the list are"
        return Question(f"{LISTED}\n\n{listed}\n\n{ask}", lead, tuple(common))


@dataclass(frozen=True, slots=True)
class SentenceRecall(DocumentTask):
    """A text of one sentence per person, `asked` of them to be repeated word for word, in the order asked.

    At each sentence boundary of the answer the model must jump. White space does not count; "exact" is 1 for all.
    """

    name: str = "sentence-recall"
    asked: int = 8
    least: int = 8  # one sentence for each person asked about

    def score(self, sample: TaskSample, token_ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, float]:
        """Return the share of the sentences that the text holds word for word."""
        said = " ".join(text.split())
        right = sum(answer in said for answer in sample.answers)
        return {"score": right / len(sample.answers), "exact": float(right == len(sample.answers))}

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw a text and the people asked about, anywhere in the text."""
        rng = seeded(self.name, length, seed)
        names = full_names(rng, units)
        sentence_of = {name: corpus.sentence(rng, name, ".").strip() for name in names}
        chosen = rng.sample(names, self.asked)
        text = paragraphs(list(sentence_of.values()))
        ask = f"Repeat word for word, one after the other, the sentences of the text above about {', '.join(chosen)}."
        lead = "The sentences are:"
        answers = tuple(sentence_of[name] for name in chosen)
        return Question(f"{RECALLED}\n\n{text}\n\n{ask}", lead, answers)


@dataclass(frozen=True, slots=True)
class BundledRecall(DocumentTask):
    """The bundled checkpoint's task: repeat a document's sentences about `asked` people, in the order asked.

    Documents are of seeds that training did not use. Score: 1 if all tokens are right, the end of the text included.
    """

    name: str = "bundled-recall"
    bundled: bool = True
    asked: int = 5

    def sample(self, tokenizer: Any, length: int, seed: int) -> TaskSample:
        """Draw the document of held-out seed `seed`."""
        self.need(tokenizer)
        if length > LONGEST:
            raise InputError(f"length must be at most {LONGEST} for task {self.name!r}, got {length}")
        size = length
        while True:
            drawn = corpus.draw(random.Random(corpus.HELD_OUT + seed), size, self.asked)  # noqa: S311
            ids = tuple(tokenizer(drawn.prompt)["input_ids"])
            if len(ids) <= length:
                break
            if size <= 0:
                raise InputError(f"length must be at least {len(ids)} for task {self.name!r}, got {length}")
            size -= max(len(ids) - length, SENTENCE)
        return TaskSample(
            task=self.name, length=length, seed=seed, prompt=drawn.prompt, prompt_ids=ids,
            answers=(drawn.answer,), max_new_tokens=len(self._wanted(drawn.answer, tokenizer)) + ROOM,
        )  # fmt: skip

    def score(self, sample: TaskSample, token_ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, float]:
        """Compare with the right tokens, position by position."""
        wanted = self._wanted(sample.answers[0], tokenizer)
        right = sum(a == b for a, b in zip(token_ids, wanted, strict=False))
        return {"score": float(list(token_ids) == wanted), "token_accuracy": right / len(wanted)}

    @staticmethod
    def _wanted(answer: str, tokenizer: Any) -> list[int]:
        ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def full_names(rng: random.Random, count: int) -> list[str]:
    """Draw different names of two words, such as ``Belora Tamvex``; there are about a million."""
    drawn = rng.sample(range(len(corpus.NAMES) ** 2), count)
    return [f"{corpus.NAMES[index // len(corpus.NAMES)]} {corpus.NAMES[index % len(corpus.NAMES)]}" for index in drawn]


def filler(rng: random.Random) -> Iterator[str]:
    """Yield sentences without end, such as ``Belora hid a red lantern under the old bridge.``."""
    while True:
        yield corpus.sentence(rng, rng.choice(corpus.NAMES), ".").strip()


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


TASKS: dict[str, DocumentTask] = {
    "niah-single": Needles("niah-single"),
    "niah-multi-key": Needles("niah-multi-key", decoys=True),
    "niah-multi-value": Needles("niah-multi-value", values=4),
    "niah-multi-query": Needles("niah-multi-query", keys=4),
    "variable-tracking": VariableTracking(),
    "common-words": CommonWords(),
    "sentence-recall": SentenceRecall(),
    "bundled-recall": BundledRecall(),
    "bundled-recall-1": BundledRecall("bundled-recall-1", asked=1),
    "bundled-recall-30": BundledRecall("bundled-recall-30", asked=30),
}


def find_task(name: str) -> DocumentTask:
    """Look a task up; raise `ConfigError` for another name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
