"""The bundled checkpoint's task: repeat a document's sentences about some people.

Documents are drawn as for training, from seeds that training did not use. Score: 1 if all tokens of the
answer are right, including the end of the text; "token_accuracy" is the share of right tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sfi_core.errors import InputError
from sfi_core.measure.evaluation.tasks.base import DocumentTask, TaskSample

ROOM = 5  # tokens beyond the right answer, to notice an answer that does not end
SENTENCE = 11  # tokens; a document is cut by whole sentences
LONGEST = 10_600  # tokens; the largest document has a thousand people


@dataclass(frozen=True, slots=True)
class BundledRecall(DocumentTask):
    """Recall of `asked` sentences, in the order asked."""

    name: str = "bundled-recall"
    bundled: bool = True
    asked: int = 5

    def sample(self, tokenizer: Any, length: int, seed: int) -> TaskSample:
        """Draw the document of held-out seed `seed`."""
        # these import torch, which listing the tasks does not need
        import random  # noqa: PLC0415

        from sfi_core.bundled.corpus import HELD_OUT, draw  # noqa: PLC0415

        self.need(tokenizer)
        if length > LONGEST:
            raise InputError(f"length must be at most {LONGEST} for task {self.name!r}, got {length}")
        size = length
        while True:
            drawn = draw(random.Random(HELD_OUT + seed), size, self.asked)  # noqa: S311
            ids = tuple(tokenizer(drawn.prompt)["input_ids"])
            if len(ids) <= length:
                break
            if size <= 0:
                raise InputError(f"length must be at least {len(ids)} for task {self.name!r}, got {length}")
            size -= max(len(ids) - length, SENTENCE)
        return TaskSample(
            task=self.name, length=length, seed=seed, prompt=drawn.prompt, prompt_ids=ids,
            answers=(drawn.answer,), max_new_tokens=len(self._wanted(drawn.answer, tokenizer)) + ROOM,
            sentences=_sentences(drawn.answer, drawn.names),
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


def _sentences(answer: str, names: Sequence[str]) -> tuple[str, ...]:
    # each begins with the name of its person, which occurs only there
    starts = [answer.index(f" {name} ") for name in names]
    return tuple(answer[start:end] for start, end in pairwise([*starts, len(answer)]))
