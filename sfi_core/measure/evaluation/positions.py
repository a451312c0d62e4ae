"""Checks that prompts and answers fit a model's positions, before anything runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from sfi_core.errors import InputError
from sfi_core.measure.evaluation.tasks import Task, TaskSample
from sfi_core.measure.evaluation.text_windows import Window


def positions_of(model: Any) -> int | None:
    """Return how many positions a model has; None if its config does not say."""
    config = model.config.get_text_config(decoder=True)
    found: int | None = getattr(config, "max_position_embeddings", None)
    return found or None


def check_lengths_asked(limit: int | None, lengths: Iterable[int]) -> None:
    """Raise `InputError` if a length exceeds the model's positions (`limit`; None for no limit)."""
    longest = max(lengths)
    if limit is not None and longest > limit:
        raise InputError(f"length must be at most the model's {limit} positions, got {longest}")


def check_task(
    limit: int | None, task: Task, tokenizer: Any, length: int, seeds: Sequence[int]
) -> TaskSample:
    """Check that a task's prompts and answers fit the model's positions; return the first seed's sample.

    Only the first seed is checked, unless the length is so near the limit that a longer answer might not fit.

    Raises:
        InputError: A sample does not fit.
    """
    first = task.sample(tokenizer, length, seeds[0])
    near = limit is not None and length + 2 * first.max_new_tokens > limit
    others = (task.sample(tokenizer, length, seed) for seed in seeds[1:]) if near else ()
    for sample in (first, *others):
        prompt, new = len(sample.prompt_ids), sample.max_new_tokens
        if limit is not None and prompt + new > limit:
            raise InputError(
                f"task {task.name!r} of length {length} must fit the model's {limit} positions, "
                f"got {prompt} prompt and {new} new tokens"
            )
    return first


def check_window(limit: int | None, window: Window) -> None:
    """Raise `InputError` if a window of a text exceeds the model's positions."""
    prompt, whole = window.prompt_tokens, len(window.ids)
    if limit is not None and whole > limit:
        raise InputError(
            f"fidelity of length {prompt} must fit the model's {limit} positions, "
            f"got {prompt} prompt and {whole - prompt} new tokens"
        )
