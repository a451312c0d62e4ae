"""The score of each sentence of a long answer, and the sentence's place in the answer."""

from typing import Any

from sfi_core.measure.evaluation.tasks.base import TaskSample


def by_sentence(
    sample: TaskSample, text: str, tokenizer: Any
) -> tuple[list[float] | None, list[float] | None]:
    """Score the sentences of an answer: 1 if the text contains the sentence, ignoring white space.

    A sentence may stand anywhere in the text, so that a lost or added word spoils one sentence only.

    Returns:
        For each sentence the tokens of the right answer before it, and its score; None for both if the right
        answer does not have several sentences.
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
