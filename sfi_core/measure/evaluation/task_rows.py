"""The row of a sample under a method: the prompt, the answer and its scores."""

from collections.abc import Iterable
from typing import Any

from sfi_core.generation.generate import Result
from sfi_core.measure.evaluation.method import MethodVariant
from sfi_core.measure.evaluation.tasks import TaskSample, find_task

COUNTS = ("verifications", "drafted", "tested", "accepted")
REPORTED = (
    "finish_reason", "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps",
    "decode_seconds", "token_ids",
)  # fmt: skip
MEASURED = (
    "score", "scores", "generated", "finish_reason", "read_ratio", "selection_ratio", "stored_ratio",
    "slow_steps", "fast_steps", *COUNTS, "decode_seconds", "tokens_per_second", "sentence_places",
    "sentence_scores", "text", "token_ids",
)  # fmt: skip


def empty_row(variant: MethodVariant, sample: TaskSample) -> dict[str, Any]:
    """Return a row with the columns known before decoding, all others empty; it sets the order."""
    return {
        **variant.columns(len(sample.prompt_ids)),
        "task": sample.task,
        "length": sample.length,
        "seed": sample.seed,
        "prompt_tokens": len(sample.prompt_ids),
        **dict.fromkeys(MEASURED),
        "scores": {},
        "expected": list(sample.answers),
        "error": None,
    }


def decoded_rows(
    variant: MethodVariant, samples: Iterable[TaskSample], result: Result, tokenizer: Any
) -> list[dict[str, Any]]:
    """Return a row for each request of a run; `samples` are in the order of the run's prompts.

    `decode_seconds` is a request's own; `tokens_per_second` is the whole run's.
    """
    rows = []
    for sample, report, text in zip(samples, result.report.requests, result.texts, strict=True):
        scores = dict(find_task(sample.task).score(sample, report.token_ids, text, tokenizer))
        places, right = by_sentence(sample, text, tokenizer)
        rows.append(
            empty_row(variant, sample)
            | {name: getattr(report, name) for name in REPORTED}
            | {
                "score": float(scores.pop("score")),
                "scores": scores,
                "generated": len(report.token_ids),
                "tokens_per_second": result.report.decode_tokens_per_second,
                "sentence_places": places,
                "sentence_scores": right,
                "text": text,
            }
            | ({name: getattr(report.lossless, name) for name in COUNTS} if report.lossless else {})
        )
    return rows


def by_sentence(sample: TaskSample, text: str, tokenizer: Any) -> tuple[list[float] | None, list[float] | None]:
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
    places = [float(len(tokenizer(start, add_special_tokens=False)["input_ids"])) if start else 0.0 for start in starts]
    return places, right
