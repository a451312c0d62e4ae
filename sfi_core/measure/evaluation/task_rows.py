"""The row of a sample under a method: the prompt, the answer and its scores."""

from collections.abc import Iterable
from typing import Any

from sfi_core.generation.generate import Result
from sfi_core.measure.evaluation.method import MethodVariant
from sfi_core.measure.evaluation.tasks import TaskSample, find_task
from sfi_core.measure.evaluation.tasks.by_sentence import by_sentence

COUNTS = ("verifications", "drafted", "tested", "accepted")
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
        lossless = report.lossless
        rows.append(
            empty_row(variant, sample)
            | {
                "score": float(scores.pop("score")),
                "scores": scores,
                "generated": len(report.token_ids),
                "finish_reason": report.finish_reason,
                "read_ratio": report.read_ratio,
                "selection_ratio": report.selection_ratio,
                "stored_ratio": report.stored_ratio,
                "slow_steps": report.slow_steps,
                "fast_steps": report.fast_steps,
                "decode_seconds": report.decode_seconds,
                "tokens_per_second": result.report.decode_tokens_per_second,
                "sentence_places": places,
                "sentence_scores": right,
                "text": text,
                "token_ids": report.token_ids,
                **({name: getattr(lossless, name) for name in COUNTS} if lossless else {}),
            }
        )
    return rows
