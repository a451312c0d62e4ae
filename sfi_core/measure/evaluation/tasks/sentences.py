"""Sentence recall: repeat eight sentences of a long text word for word.

Every sentence of the text is about another person. At each sentence boundary of the answer, the model must
jump to another place of the text. Score: the share of the asked sentences in the answer, ignoring white
space; "exact" is 1 if the answer has all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sfi_core.bundled.corpus import sentence
from sfi_core.measure.evaluation.tasks.base import DocumentTask, Question, TaskSample, seeded
from sfi_core.measure.evaluation.tasks.words import full_names, paragraphs

INSTRUCTION = (
    "Each sentence of the text below is about another person. You will be asked to repeat some of "
    "the sentences word for word."
)


@dataclass(frozen=True, slots=True)
class SentenceRecall(DocumentTask):
    """A text of one sentence per person, `asked` of them to be repeated in the order asked."""

    name: str = "sentence-recall"
    asked: int = 8

    @property
    def least(self) -> int:
        """One sentence for each person asked about."""
        return self.asked

    def score(self, sample: TaskSample, token_ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, float]:
        """Return the share of the sentences that the text holds word for word."""
        said = " ".join(text.split())
        right = sum(answer in said for answer in sample.answers)
        return {"score": right / len(sample.answers), "exact": float(right == len(sample.answers))}

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw a text and the people asked about, anywhere in the text."""
        rng = seeded(self.name, length, seed)
        names = full_names(rng, units)
        told = {name: sentence(rng, name, ".").strip() for name in names}
        chosen = rng.sample(names, self.asked)
        text = paragraphs(list(told.values()))
        ask = f"Repeat word for word, one after the other, the sentences of the text above about {', '.join(chosen)}."
        lead = "The sentences are:"
        answers = tuple(told[name] for name in chosen)
        return Question(
            f"{INSTRUCTION}\n\n{text}\n\n{ask}", lead, answers, sentences=tuple(f" {answer}" for answer in answers)
        )
