"""The score of each sentence of a long answer, and the sentence's place in the answer."""

from typing import Any

from sfi_core.measure.evaluation.tasks.base import TaskSample


def by_sentence(
    sample: TaskSample, text: str, tokenizer: Any
) -> tuple[list[float] | None, list[float] | None]:
    """Score the sentences of an answer one by one: 1 where the text has it word for word, white space apart.

    A sentence counts wherever the text has it, so that a lost or an added word spoils one sentence only.

    Args:
        sample: The sample, with the sentences of its right answer.
        text: The answer that came.
        tokenizer: The model's tokenizer.

    Returns:
        For each sentence its place, the tokens of the right answer before it, and its score. None for both
        where a right answer does not have several sentences.
    """
    if len(sample.sentences) < 2:  # noqa: PLR2004 - several
        return None, None
    said = " ".join(text.split())
    right = [float(" ".join(sentence.split()) in said) for sentence in sample.sentences]
    starts = ["".join(sample.sentences[:count]) for count in range(len(sample.sentences))]
    places = [
        float(len(tokenizer(start, add_special_tokens=False)["input_ids"])) if start else 0.0
        for start in starts
    ]
    return places, right
